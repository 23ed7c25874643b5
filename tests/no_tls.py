"""The TLS context of clients that use plain HTTP."""

import ssl

# It trusts nobody. The usual one reads the certificates of all authorities, for every client,
# which takes longer than most requests.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
