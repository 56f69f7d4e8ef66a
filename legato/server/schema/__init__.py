"""The request bodies: fields, types, ranges, and the errors that name a field."""
