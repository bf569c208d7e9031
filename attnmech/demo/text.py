"""The paragraph that attnmech shows when it is given no text."""

PARAGRAPH = (
    "Anna painted a small boat near the harbour. The sails behind the blue boat (made by Tom) were new. "
    "Anna lost her anchor, so she walked to the beach. When Anna and Tom came to the harbour, Tom gave "
    "an old anchor to Anna. Anna sang of shells and waves, of shells and waves."
)
"""A little story in the demo model's language.

It holds a name that comes back, a verb that agrees across another noun, a bracket, a pronoun, a recipient
and a span said twice.
"""
