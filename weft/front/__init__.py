"""The front process: HTTP in OpenAI's protocol towards clients, typed messages towards a head. No torch."""
