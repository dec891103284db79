"""`kvxfer bench`: what transfers take, always beside a reference that was measured in the same run."""
