"""The step loop with a scheduler and a runner, and the engine process around the step loop."""
