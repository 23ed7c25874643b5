"""The page at `/`: agents, memory, what happens now, chat, models, and how to connect.

1. `routes.py` serves the page to browsers and greets programs.
2. `static/` is the page: plain modules and a style sheet, no build step. `main.js` is the frame,
   `server.js` what it knows of the server and how it hears of changes, the others a view each.
   `vendor/` holds Preact with htm and uPlot, with their licences beside them.

The page is fed by the API that everybody has, and loads nothing from elsewhere.
"""
