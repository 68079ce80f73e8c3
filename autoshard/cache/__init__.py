"""Programs on disk: what decides one (digest, key), where they lie, how they are found again."""
