"""The rows of docs/compatibility.md about pictures: one for each type of tower, and the ways in which pictures come."""

from __future__ import annotations

from tests.programs.compatibility_models import PICTURES as QWEN
from tests.programs.compatibility_rows import FILES, Row

FILES |= {f"{name} pictures": f"tests/pictures/test_{name}.py" for name in "law decoding settings mmproj".split()}
FILES |= {
    f"{name} pictures": f"tests/pictures/test_{name}.py"
    for name in "idefics3 smolvlm internvl mistral3 llava llama4 gemma3".split()
}
FILES |= {
    "served pictures": "tests/serve/test_pictures.py",
    "fetching": "tests/serve/call/test_fetching.py",
    "chat page": "tests/inspector/test_chat.py",
}
SEEN = "test_pixels_tokens_and_logits_are_those_of_transformers"
TWINS = "cuda by its twins, no GPU so far"


def _tower(name: str, models: str) -> Row:
    return Row(name, "partly", f"{models}; {TWINS}", (f"{name} pictures:{SEEN}",))


TOWERS = (
    _tower("idefics3", "Idefics3-8B, Granite Docling"),
    _tower("smolvlm", "SmolVLM, SmolVLM2; no videos"),
    _tower("internvl", "InternVL3, InternVL3.5 in transformers' layout; no videos"),
    _tower("mistral3", "Mistral Small 3.1 to 4, Ministral 3, with Pixtral's tower"),
    _tower("llava", "LLaVA 1.5, Pixtral 12B, and others with the towers of CLIP, SigLIP and Pixtral"),
    _tower("llama4", "Llama 4 Scout, Maverick"),
    Row(
        "gemma3",
        "partly",
        "Gemma 3 4B to 27B; cuda refuses its pictures by name",
        ("gemma3 pictures:test_pixels_tokens_and_logits_are_those_of_transformers",),
    ),
    Row("qwen2_5_vl, qwen3_vl, qwen3_5", "partly", "see Models; no videos", (QWEN,)),
    Row(
        "towers in GGUF files",
        "partly",
        "`--mmproj`, or the file beside the model: idefics3, internvl, pixtral, mlp (LLaVA), llama4; not Qwen's",
        (
            "mmproj pictures:test_logits_are_those_of_safetensors_and_of_transformers",
            "mmproj pictures:test_a_served_model_reads_pictures_with_its_file",
        ),
    ),
    Row(
        "a picture in a chat",
        "yes",
        "OpenAI (chat, responses), Anthropic, Ollama, by their own clients; as data; a result of a tool",
        ("served pictures:test_every_api_reads_the_same_picture", "served pictures:test_a_tool_shows_a_picture"),
    ),
    Row(
        "a picture by its address",
        "yes",
        "`--allowed-media-domains`; nothing of a private network",
        (
            "fetching:test_no_form_of_an_address_reaches_the_own_machine",
            "fetching:test_a_name_that_resolves_to_the_own_machine",
            "fetching:test_what_a_host_replies",
        ),
    ),
    Row(
        "files of strangers",
        "yes",
        "PNG, JPEG, WebP, GIF's first frame, EXIF; bombs are a 400",
        (
            "decoding pictures:test_forms_of_files",
            "decoding pictures:test_S_16_a_bomb_is_refused_by_its_declared_size",
            "decoding pictures:test_files_that_are_cut_or_changed_are_read_or_refused",
        ),
    ),
    Row(
        "the same bits",
        "yes",
        "in company, in pieces, cached, preempted, after a crash; the cache knows pictures by their pixels",
        (
            "law pictures:test_I_13_in_company_in_pieces_cached_preempted",
            "law pictures:test_S_23_the_cache_knows_pictures_by_their_pixels",
            "served pictures:test_the_engine_dies_in_an_answer_about_a_picture",
        ),
    ),
    Row(
        "pictures on the page",
        "yes",
        "attached, dropped or pasted in the chat; their rows in the cache",
        (
            "chat page:test_a_picture_is_sent_and_stays_in_the_conversation",
            "served pictures:test_people_see_the_rows_of_pictures",
        ),
    ),
    Row("videos, sound", "no", "refused by name", ("served pictures:test_bad_pictures",)),
)
