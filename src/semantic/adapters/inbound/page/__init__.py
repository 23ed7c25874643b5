"""The web page at `/`: agents, memory, live activity, chat, models, and how to connect clients.

`routes.py` serves the page to browsers, a short JSON to programs, and `/docs`. `static/` is the
page: plain JavaScript modules and a style sheet, no build step. `main.js` is the frame, `server.js`
calls the API and listens for changes, and the others are one view each. `vendor/` has Preact with
htm, and uPlot, with their licences.

The page uses only the public API and loads nothing from other hosts.
"""
