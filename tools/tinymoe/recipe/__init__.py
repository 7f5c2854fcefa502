"""Where the training text of tinymoe comes from, and what is done to it.

The modules follow the order of work:

    packages    which Debian and PyPI packages are read, under which licences
    cleaning    functions on plain strings: cleaning, cutting, guessing the language
    markup      HTML and man pages to plain text
    readers     one function per kind of source: documentation, dictionaries, quotations, books
    games       dialogue and descriptions of four free games, with their translations
    sourcecode  Python and C files
    extract     the list of all sources: which reader, which files, which domain
    split       boilerplate, duplicates, the hold-out, the validation texts
    tokens      the tokenizer and the token arrays
    sources     the table of sources and licences
"""

from __future__ import annotations

DOMAINS = ("prose", "dict", "tech", "python", "c", "fr", "de", "es")

# At most so many characters are kept per domain; documents are drawn at random up to it.
MAX_CHARS = {
    "prose": 30e6,
    "dict": 12e6,
    "tech": 33e6,
    "python": 22e6,
    "c": 21e6,
    "fr": 22e6,
    "de": 22e6,
    "es": 22e6,
}

VOCAB_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
