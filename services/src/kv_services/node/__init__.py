"""One node that holds KV: prefill, decode and store roles over one arena."""
