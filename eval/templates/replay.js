
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("replay-data").textContent);
  const find = (name) => document.getElementById("replay-" + name);
  const panels = data.entries.map((_, i) => ({
    text: find("text-" + i), status: find("status-" + i), shown: -1,
  }));
  const end = Math.max(...data.entries.map((e) => e.frames[e.frames.length - 1][0]), 1e-6);
  const play = find("play"), slider = find("slider"), clock = find("clock"), speed = find("speed");
  // Small models answer in milliseconds: by default the slowest takes 6 to 20 seconds to watch.
  const fitting = Math.min(Math.max(end, 6), 20) / end;
  let at = end, last = null;

  const written = (s) => (s < 1 ? (1000 * s).toFixed(s < 0.1 ? 1 : 0) + " ms" : s.toFixed(2) + " s");
  const stretch = () => (speed.value === "real" ? 1 : fitting);

  function frameAt(frames, time) {
    let low = -1, high = frames.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (frames[middle][0] <= time) low = middle; else high = middle - 1;
    }
    return low;
  }

  function draw() {
    data.entries.forEach((entry, i) => {
      const panel = panels[i], number = frameAt(entry.frames, at);
      if (number === panel.shown) return;
      panel.shown = number;
      const [time, calls, tokens, segments] = number < 0 ? [0, 0, 0, []] : entry.frames[number];
      const prompt = document.createElement("span");
      prompt.className = "prompt";
      prompt.textContent = data.prompt;
      panel.text.replaceChildren(prompt, ...segments.map(([text, known]) => {
        const span = document.createElement("span");
        span.textContent = text;
        if (!known) span.className = "unknown";
        return span;
      }));
      const rate = time > 0 && tokens > 0 ? ", " + Math.round(tokens / time) + " tokens/s" : "";
      const done = number === entry.frames.length - 1 ? "done at " + written(time) + ": " : "";
      panel.status.textContent = done + calls + " calls, " + tokens + " tokens" + rate;
    });
    slider.value = Math.round(1000 * at / end);
    const factor = stretch();
    const pace = factor === 1 ? "" : factor > 1
      ? ", shown " + factor.toPrecision(2) + " times slower"
      : ", shown " + (1 / factor).toPrecision(2) + " times faster";
    clock.textContent = written(at) + " of " + written(end) + pace;
  }

  function tick(now) {
    if (last === null) return;
    at = Math.min(end, at + (now - last) / 1000 / stretch());
    last = now;
    draw();
    if (at >= end) pause(); else requestAnimationFrame(tick);
  }

  function pause() {
    last = null;
    play.textContent = "play";
  }

  play.addEventListener("click", () => {
    if (last !== null) return pause();
    if (at >= end) at = 0;
    last = performance.now();
    play.textContent = "pause";
    requestAnimationFrame(tick);
  });
  slider.addEventListener("input", () => {
    pause();
    at = end * slider.value / 1000;
    draw();
  });
  speed.addEventListener("change", draw);
  find("controls").hidden = false;
  draw();
})();
