"""`kvctl demo`: a real cluster on this machine, real chat requests, and every token compared with a single process."""
