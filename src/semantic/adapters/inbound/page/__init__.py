"""The web page at `/`: agents, branches, memory, activity, chat, models, how to connect clients.

`routes.py` serves the page to browsers, a short JSON to programs, and `/docs`. `static/` is the
page: plain JavaScript modules and a style sheet, no build step. `main.js` is the frame, `server.js`
calls the API and listens for changes, and most others are one view each. The chat is `chat.js` with
`turns.js`, `composer.js`, `replies.js` (replies that are being written) and `markdown.js`.
`words.js` finds the words in which two texts differ. `vendor/` has Preact with htm, uPlot, marked,
DOMPurify, highlight.js and jsdiff, with their licences.

The page uses only the public API and loads nothing from other hosts.
"""
