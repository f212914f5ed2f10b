"""The keeper from the other side: see pause/keeper.c."""
