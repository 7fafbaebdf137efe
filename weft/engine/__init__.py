"""The step loop: a scheduler and a runner, joined; and the head process around them."""
