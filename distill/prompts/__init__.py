"""Where prompts come from: files, datasets and tasks, as a resumable stream."""
