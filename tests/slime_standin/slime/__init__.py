"""Stands in for slime in tests: the few types that its plug-ins see, from the facts about it."""
