"""The step loop with its scheduler and runner, and the head process around the step loop."""
