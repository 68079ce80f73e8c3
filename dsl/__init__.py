"""The plan language: parser, schema, resolver and formatter."""
