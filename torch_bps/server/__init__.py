"""The CPU summation server: a pure engine, a reducer, the service that joins them to channels. Runs without torch."""
