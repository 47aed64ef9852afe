"""What is refused, and what to do instead: the texts, in one place."""

from __future__ import annotations

OTHER_BATCH = (
    "{} sequences were fed to a cache of {}: begin it with all rows of the batch "
    "(kv.cache(ids, attention_mask=mask)), for num_beams or num_return_sequences with copies=n; "
    "kv.generate() does all of it"
)
OTHER_KEYWORD = (
    "this release of Transformers does not know the argument cache=: pass past_key_values=, "
    "which every release takes"
)
OWN_CACHE = (
    "{} is what kv.generate() chooses itself: leave it out, or call model.generate() with "
    "a cache of kv.cache(ids)"
)
WHOLE_CACHE = "the layers of a tierkv cache change together: call this on the cache itself"
WINDOW_GONE = (
    "tokens are to be taken back to where the window of a sliding layer is gone: call "
    "cache.activate_past_recording() before feeding them (kv.generate() does), or generate "
    "without assistant_model and prompt_lookup_num_tokens"
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
    "the attention mask has zeros elsewhere than before the rows' first tokens as this cache was "
    "begun (or generate() made a mask for ids equal to the pad token): begin the cache with the "
    "same left-padded mask, or pass a mask of ones"
)
NO_MASK = (
    "several rows, one of which begins or ends with the pad token, and no attention_mask: pass "
    "the mask that the tokenizer made, or one of ones if these are real tokens"
)
RIGHT_PADDING = (
    "the attention mask must be zeros and then ones in every row (left padding), with at least "
    "one token: set tokenizer.padding_side = 'left'"
)
POSITIONS = (
    "{} is not the plain continuation of the tokens that each row holds (row {}: from {} on); "
    "positions are not part of a page's identity: leave them out, or for a left-padded batch "
    "pass (mask.cumsum(-1) - 1).clamp(min=0) of the new columns"
)
TOO_LONG = (
    "{} tokens and {} to come are {}, but the model knows positions up to {} "
    "(max_position_embeddings): shorten the prompt, or lower max_new_tokens"
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
NOT_ATTENDED = (
    "layer {}: its pages were opened for attention (attn_implementation='tierkv'), but attention "
    "did not ask for them: a model that copies or cuts the keys of its cache would compute wrong "
    "results; call model.set_attn_implementation('sdpa'), abandon this cache and attach again"
)
ATTENDED_TWICE = (
    "layer {}: attention asked a second time for pages that it had read (layers that share keys, "
    "or keys kept from an earlier step); call model.set_attn_implementation('sdpa')"
)
OTHER_ATTENTION = (
    "attn_implementation='tierkv' does not compute attention with {}: call "
    "model.set_attn_implementation('eager')"
)
NO_WEIGHTS = (
    "attn_implementation='tierkv' returns no attention weights (output_attentions): call "
    "model.set_attn_implementation('eager')"
)
ATTENTION_CHANGED = (
    "the model attends by {!r} now, but attended by {!r} when TierKV was attached, and their "
    "states differ in the last bits: attach again after set_attn_implementation"
)
SPENT = "the cache was committed or abandoned: begin a new one with the whole sequence"
