"""The kinds of transport that come with Baton. They are found by entry point, never imported."""
