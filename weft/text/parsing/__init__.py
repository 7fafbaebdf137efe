"""What a model's output consists of: thoughts, tool calls and content, told apart while it streams."""
