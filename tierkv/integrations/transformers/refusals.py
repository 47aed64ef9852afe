"""What is refused, and what to do instead: the texts, in one place."""

from __future__ import annotations

BATCH = (
    "a tierkv cache holds one sequence, and a batch of several was fed: begin one cache a "
    "sequence and feed them one at a time"
)
BEAMS = (
    "beam search moves state between sequences, which a tierkv cache does not do yet: use "
    "num_beams=1 and num_return_sequences=1, or a stock cache"
)
ASSISTED = (
    "assisted generation (assistant_model, prompt_lookup_num_tokens, crop) takes tokens back, "
    "which a tierkv cache does not do yet: generate without it, or with a stock cache"
)
RESET = (
    "a tierkv cache cannot be reset: its pages may serve other sequences. Abandon it and "
    "begin a new one"
)
COPY = (
    "a tierkv cache cannot be copied or pickled: it holds pages of a store. Commit it and "
    "begin another one with the same ids; pages are shared"
)
EMBEDS = "inputs_embeds has no token ids to key pages by: feed input_ids, or use a stock cache"
PADDING = (
    "the attention mask has zeros (padding, or ids equal to the pad token for which generate() "
    "made the mask): remove the padding and pass a mask of ones as long as the ids"
)
CUSTOM_MASK = (
    "a mask other than one 2-D row of ones changes the state that later tokens see, and is not "
    "part of a page's identity: leave it out, or use a stock cache"
)
TRAINING = "the model is in training mode, where dropout makes its state random: call model.eval()"
ADAPTER = (
    "an adapter (PEFT/LoRA) is active on the model, so its state differs from the base "
    "model's: pass adapter=, an id or digest of the adapter that you vouch for, or merge it"
)
PROMPT_LEARNING = (
    "prompt or prefix tuning puts state before the first token that no ids describe: "
    "use a stock cache"
)
SEVERAL_DEVICES = (
    "the model is spread over several devices, and a tierkv cache lives on one: "
    "load the model on one device"
)
UNRECORDED = (
    "the model did not tell the cache what it is fed: call the attached model itself (not a "
    "part of it, nor another model), and do not use the cache after TierKV is closed"
)
BROKEN = (
    "an earlier forward ended inside the model, so that its layers hold different numbers of "
    "tokens: abandon this cache and begin a new one"
)
SPENT = "the cache was committed or abandoned: begin a new one with the whole sequence"
