"""Trains the vision tower and connector of `starter-vision` on pictures that a script draws.

1. `vocabulary.py` lists what can appear in a picture, and the wordings of questions.
2. `pictures.py` draws a picture and records what is in it; `interface.py` draws windows.
3. `questions.py` asks about a picture and gives the answers.
4. `network.py` builds the tower and connector with transformers' classes, and the frozen text model
   from the starter's files; `prompts.py` writes conversations as token ids.
5. `train.py` runs the training, `evaluate.py` measures a model directory on held-out pictures.
"""
