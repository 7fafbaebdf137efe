"""The step loop with a scheduler and a runner, and the head process around the step loop."""
