"""Conversations: what a request's chat may say, and how the model's answer is read.

Before the prompt: `door` checks a conversation and parses its tools; `messages` gives turns and tools the form that chat
templates expect. After it: `answer` reads the text of an answer, piece by piece, into content, reasoning (`think`) and tool
calls, one file per format (`hermes`, `llama3`, `mistral`) over one reader of calls (`call_reader`, `json_scan`); `formats`
chooses by settings, template and vocabulary, and `tool_grammar` writes the language of an answer that must call a tool. The
readers do no input or output and never raise: text that is no call is content. Templates are rendered by `router.template`,
not here.
"""
