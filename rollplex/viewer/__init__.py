"""What a person sees of a run: `live`, while it goes on. It knows no model, no file and no step."""
