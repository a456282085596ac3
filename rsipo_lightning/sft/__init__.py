"""Stage 1, the command ``rsipo-sft``: episodes -> labels -> rows -> fine-tuning.

``run`` is the whole line, ``labels`` says what a label is and where it comes from, ``training``
takes rows through the trainer that RL uses, ``report`` shows what the tiny policy has learned.
"""
