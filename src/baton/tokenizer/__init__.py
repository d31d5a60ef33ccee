"""Prompts to token ids, in workers and in gateways alike.

In: texts, chats; a model's folder. Out: token ids, as the model's own tokenizer and chat template
make them.

    tokenizer.py        text to token ids and back
    chat_template.py    messages to text
    long_texts.py       whether a text has too many tokens
    digest.py           whether two processes make the same token ids
"""
