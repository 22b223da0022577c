"""Many runs of one task as one program: every weight has a leading *run* axis."""
