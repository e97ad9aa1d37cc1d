"""The workspace: Python modules that lie beside the notebook, sent to the ranks and reloaded there."""
