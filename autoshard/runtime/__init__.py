"""Run a linked Program on one rank: communicators, generated code, storage, the engine."""
