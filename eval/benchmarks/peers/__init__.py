"""Other projects' implementations, for processes of their own: genlab imports none of them."""
