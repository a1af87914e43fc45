"""Python clients of a server: calls with retries, live streams; for threads and for asyncio."""
