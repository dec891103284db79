"""The decode side of transfers: fetches over all prefill ranks, what each of them sends, and claims."""
