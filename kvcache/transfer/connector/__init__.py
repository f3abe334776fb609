"""What a KV connector needs beside the bytes: requests, events, reports of all workers made one."""
