"""The model `starter-vision`: the starter model with a small vision tower, to try images.

`building.py` joins the starter's files with the tower's weights, which are in `tower.safetensors`.
`config.json`, `preprocessor_config.json` and `chat_template.jinja` describe the result. The folder
`training` of the repository has the script that trained the tower.
"""
