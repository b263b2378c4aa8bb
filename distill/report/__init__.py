"""What a run tells people and programs: metrics, progress, picture, summary."""
