"""What a call costs by the equations, what this machine can do, and what follows for both."""
