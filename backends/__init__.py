"""The outside world: engines that generate and trainers that learn, each behind the small protocol that a pipeline
asks for. A backend imports what it needs (torch, a server's client) and nothing else in rolloutbus does.
"""
