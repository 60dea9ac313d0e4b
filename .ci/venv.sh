#!/bin/sh
# Makes or repairs the virtual environment that the Makefile's commands run in.
#
# Read from the environment: VENV (its folder), PYTHON (an interpreter to use instead of the newest
# suitable one found), EXTRAS (comma-separated extras of pyproject.toml, such as cuda).
# Prints nothing and takes a few hundredths of a second when there is nothing to do.
set -eu

# Tried from left to right. A version belongs here once requirements/ has its constraints; 3.14
# comes last because the test suite runs on the first three.
versions="3.13 3.12 3.11 3.14"

root=$(cd "$(dirname "$0")/.." && pwd -P)
cd "$root"
venv=${VENV:-.venv}
case $venv in /*) ;; *) venv=$root/$venv ;; esac
stamp=$venv/genlab-installed     # what is installed; written last
unfinished=$venv/genlab-unfinished  # there while an installation runs, or after one was cut off
extras_note=$venv/genlab-extras  # extras stay chosen for later calls that name none

fail() {
  printf 'genlab: %s\n' "$1" >&2
  exit 1
}

# Prints the version (3.13) of a suitable interpreter, "no: WHY" for one that runs but does not
# suit, and nothing for one that does not run (a pyenv shim of a version that is not active).
probe() {
  "$1" -c '
import sys
def say(text):
    sys.stdout.write(text + "\n")
    sys.exit(0)
version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    say("no: is Python " + version)
if sys.implementation.name != "cpython":
    say("no: is " + sys.implementation.name + ", not CPython")
if sys.maxsize < 2**32:
    say("no: is a 32-bit build")
import platform, sysconfig
if sys.platform == "darwin" and platform.machine() != "arm64":
    say("no: is an x86-64 build, and JAX for macOS exists for arm64 only")
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    say("no: is a free-threaded build")
try:
    import ensurepip, venv
except ImportError:
    say("no: lacks venv or ensurepip (on Debian and Ubuntu: apt install python%s-venv)" % version)
say(version)
' 2>/dev/null </dev/null || true
}

# Prints what tells one interpreter from another, through any virtual environment.
identity() {
  "$1" -c '
import os, sys
print("%d.%d.%d" % sys.version_info[:3], os.path.realpath(sys.base_prefix))
' 2>/dev/null </dev/null || true
}

# Prints paths under which version $1 may be found, one a line: every match on PATH, for the first
# need not run, then the usual places of pyenv, uv, Homebrew and python.org.
places() {
  (
    set -f
    IFS=:
    for folder in $PATH; do
      for name in "python$1" python3 python; do
        printf '%s/%s\n' "${folder:-.}" "$name"
      done
    done
  )
  pyenv_root=${PYENV_ROOT:-}
  if [ -z "$pyenv_root" ] && command -v pyenv >/dev/null 2>&1; then
    pyenv_root=$(pyenv root 2>/dev/null || true)
  fi
  for path in "${pyenv_root:-${HOME:-/}/.pyenv}/versions/$1".*/bin/python \
    "${XDG_DATA_HOME:-${HOME:-/}/.local/share}"/uv/python/cpython-"$1".*/bin/python3 \
    "/opt/homebrew/bin/python$1" "/usr/local/bin/python$1" \
    "/Library/Frameworks/Python.framework/Versions/$1/bin/python$1"; do
    printf '%s\n' "$path"
  done
}

# Prints "VERSION PATH" of the first suitable interpreter; $1 takes a note of those turned down.
choose() {
  for version in $versions; do
    places "$version" | while IFS= read -r path; do
      [ -x "$path" ] && [ ! -d "$path" ] || continue
      case $path in "$venv"/*) continue ;; esac
      found=$(probe "$path")
      case $found in
        "$version") printf '%s %s\n' "$version" "$path"; break ;;
        no:*) printf '  %s %s\n' "$path" "${found#no: }" >>"$1" ;;
        "") printf '  %s does not run\n' "$path" >>"$1" ;;
        *) printf '  %s is Python %s\n' "$path" "$found" >>"$1" ;;
      esac
    done
  done | head -n 1
}

lock_of() { printf 'requirements/constraints-py%s.txt' "$(printf '%s' "$1" | tr -d .)"; }

# What has to be equal for an installation to be current: a moved checkout or a changed lock is not.
wanted() {
  printf '%s\nextras: %s\n' "$root" "$extras"
  cat pyproject.toml .ci/venv.sh "$(lock_of "$1")" | cksum
}

extras=${EXTRAS:-}
if [ -z "$extras" ] && [ -f "$extras_note" ]; then extras=$(cat "$extras_note"); fi
extras=$(printf '%s' "$extras" | tr -d ' ')

chosen=""
if [ -n "${PYTHON:-}" ]; then
  path=$(command -v "$PYTHON" || true)
  [ -n "$path" ] || fail "PYTHON=$PYTHON was not found"
  case $path in "$venv"/*) fail "PYTHON=$PYTHON lies in the environment that it should make" ;; esac
  found=$(probe "$path")
  case $found in
    "") fail "PYTHON=$PYTHON does not run" ;;
    no:*) fail "PYTHON=$PYTHON ${found#no: }; wanted Python 3.11 or newer with venv and ensurepip" ;;
  esac
  [ -f "$(lock_of "$found")" ] ||
    fail "PYTHON=$PYTHON is Python $found; there are pinned versions for: $versions"
  chosen="$found $path"
fi

# Keep an environment that works, unless another interpreter was asked for by name.
present=""
if [ -x "$venv/bin/python" ] && [ ! -e "$unfinished" ]; then
  found=$(probe "$venv/bin/python")
  if [ -n "$found" ] && [ -f "$(lock_of "$found")" ] &&
    "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
    present=$found
  fi
  if [ -n "$present" ] && [ -n "$chosen" ] &&
    [ "$(identity "$venv/bin/python")" != "$(identity "${chosen#* }")" ]; then
    present=""
  fi
fi

if [ -n "$present" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted "$present")" ]; then
  exit 0
fi

# A checkout that was moved leaves scripts behind that start an interpreter at the old place.
if [ -n "$present" ] && [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" != "$root" ]; then
  present=""
fi

if [ -z "$present" ]; then
  if [ -z "$chosen" ]; then
    notes=$(mktemp "${TMPDIR:-/tmp}/genlab-python.XXXXXX")
    trap 'rm -f "$notes"' EXIT
    chosen=$(choose "$notes")
    if [ -z "$chosen" ]; then
      printf 'genlab: no suitable Python found; wanted CPython 3.11 to %s with venv. Tried:\n' \
        "$(printf '%s\n' $versions | sort -t. -k2 -n | tail -n 1)" >&2
      if [ -s "$notes" ]; then sort -u "$notes" >&2; else printf '  nothing: no python3\n' >&2; fi
      fail "install one, or name one: make PYTHON=/path/to/python3 ..."
    fi
  fi
  present=${chosen%% *}
  printf 'genlab: making %s with Python %s (%s)\n' "$venv" "$present" "${chosen#* }"
  mkdir -p "$venv"
  : >"$unfinished"
  "${chosen#* }" -m venv --clear "$venv" || fail "could not make a virtual environment in $venv"
fi

lock=$(lock_of "$present")
: >"$unfinished"
rm -f "$stamp"
quiet=""
[ -t 1 ] || quiet=-q
printf 'genlab: installing into %s the versions pinned in %s (once)\n' "$venv" "$lock"
install() {
  # Build isolation would fetch an unpinned setuptools, so the pinned one goes in first.
  "$venv/bin/python" -m pip install $quiet --disable-pip-version-check --no-input -c "$lock" \
    setuptools &&
    "$venv/bin/python" -m pip install $quiet --disable-pip-version-check --no-input -c "$lock" \
      --no-build-isolation -e ".[dev${extras:+,$extras}]"
}
install </dev/null || fail "the installation failed, see above; the next call starts it afresh"
(cd / && "$venv/bin/python" -P -c 'import genlab') ||
  fail "genlab was installed into $venv but cannot be imported"
printf '%s' "$extras" >"$extras_note"
wanted "$present" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$unfinished"
