"""The rows of docs/compatibility.md about models: one for each type."""

from __future__ import annotations

from tests.programs.compatibility_rows import Row

EQUAL, LAW = "transformers:test_logits_equal_transformers", "bits:test_I_13_bits_through_the_runner"
PACKED, GGUF = "families:test_quantised_weights_are_packed_and_mapped", "gguf:test_floats_have_the_bits_of_safetensors"
ON_CUDA = "types:test_a_type_gives_the_tokens_of_torch_ref_or_is_refused"
SHOWN, SHOWN_GGUF = (EQUAL, LAW, ON_CUDA), (EQUAL, LAW, ON_CUDA, GGUF)
ON_GPU = "of cuda a tiny model alone ran on a GPU"
PICTURES = "qwen pictures:test_logits_are_those_of_transformers_however_a_prompt_is_cut"
NO_VIDEO = "pictures, no videos; of pictures on cuda twins alone ran"
TWINS = "cuda by its twins, no GPU so far"
NO_CUDA_BIAS = "cuda refuses it by name"
VECTORS_ON_CUDA = "types:test_an_encoder_gives_the_vectors_of_torch_ref_or_is_refused"
LAW_OF_STATES = "states:test_I_13_bits_of_states_do_not_depend_on_chunks_company_or_threads"
GGUF_STATES = "gguf_states:test_a_file_is_the_model_of_its_safetensors"
GGUF_HYBRID = "gguf_hybrids:test_a_hybrids_file_is_the_model_of_its_safetensors"
STATES = (EQUAL, LAW_OF_STATES, ON_CUDA, PACKED)
STATES_GGUF = (*STATES, GGUF_STATES)
HYBRID_GGUF = (*STATES, GGUF_HYBRID)
RULES = {
    EQUAL: ("logits", "equal to transformers'"),
    LAW: ("bits", "the same in any batch, in chunks and with any number of threads"),
    LAW_OF_STATES: ("states", "the same for layers with a state"),
    PACKED: ("packed", "quantised weights are packed and mapped"),
    ON_CUDA: ("cuda", "the tokens of torch_ref by the twins of the GPU's kernels"),
    VECTORS_ON_CUDA: ("cuda vectors", "the vectors of torch_ref by them"),
    GGUF: ("GGUF", "the bits of the safetensors"),
    GGUF_STATES: ("GGUF states", "the same for recurrent layers"),
    GGUF_HYBRID: ("GGUF hybrid", "the same for recurrent layers beside attention"),
}
"""Tests of many rows: the word that stands for each in the table, and its meaning."""

ENCODER_TESTS = (
    "encoders:test_vectors_are_transformers_hidden_states",
    VECTORS_ON_CUDA,
    "served encoders:test_an_encoder_answers_at_every_door_for_vectors",
)
ENCODERS = (
    Row("bert", "partly", f"all-MiniLM, bge, e5, mxbai; {TWINS}", ENCODER_TESTS),
    Row("roberta", "partly", f"all-roberta; {TWINS}", ENCODER_TESTS[:2]),
    Row("xlm-roberta", "partly", f"multilingual-e5, bge-m3's dense vectors; {TWINS}", ENCODER_TESTS[:2]),
    Row("camembert", "partly", f"sentence-camembert; {TWINS}", ENCODER_TESTS[:2]),
    Row(
        "electra",
        "partly",
        f"the discriminator, with embeddings as wide as the layers; {TWINS}",
        (*ENCODER_TESTS[:2], "encoders:test_narrow_embeddings_of_electra_are_refused"),
    ),
    Row("distilbert", "partly", f"multi-qa-distilbert; {TWINS}", ENCODER_TESTS[:2]),
    Row(
        "mpnet",
        "partly",
        f"all-mpnet-base-v2, multi-qa-mpnet; {NO_CUDA_BIAS}",
        (ENCODER_TESTS[0], "encoders:test_biases_by_distance_at_every_length"),
    ),
    Row(
        "jina-bert-v2",
        "partly",
        f"jina-embeddings-v2-base and -small, by an oracle written from the papers; {NO_CUDA_BIAS}",
        ("jina:test_vectors_are_those_of_the_papers", "jina:test_other_forms_are_refused"),
    ),
    Row("modernbert", "partly", f"modernbert-embed, gte-modernbert; {TWINS}", ENCODER_TESTS[:2]),
    Row(
        "nomic_bert",
        "partly",
        f"nomic-embed-text; {TWINS}",
        (*ENCODER_TESTS[:2], "encoders:test_the_first_files_of_nomic_bert_have_other_keys"),
    ),
    Row("gte", "partly", f"gte-base-en-v1.5 in transformers' layout; {TWINS}", ENCODER_TESTS[:2]),
    Row(
        "new",
        "partly",
        f"the same as its first files have it; {TWINS}",
        ("encoders:test_the_first_files_of_gte_have_another_type",),
    ),
)
"""Types whose texts become vectors."""

MODELS = (
    Row("llama", "yes", "Llama 1 to 3.3, SmolLM 1 and 2; GGUF llama", SHOWN_GGUF),
    Row("mistral", "yes", "Mistral 7B; GGUF llama", SHOWN_GGUF),
    Row("mixtral", "yes", "Mixtral; GGUF llama", SHOWN_GGUF),
    Row("qwen2", "yes", "Qwen2, Qwen2.5; GGUF qwen2", SHOWN_GGUF),
    Row("qwen2_moe", "yes", "Qwen1.5-MoE, Qwen2-57B-A14B; GGUF qwen2moe", (*SHOWN_GGUF, PACKED)),
    Row(
        "qwen2_5_vl",
        "partly",
        "Qwen2.5-VL; of Qwen2-VL, and of GGUF qwen2vl, the text; pictures, no videos; cuda refuses pictures by name",
        (*SHOWN_GGUF, PACKED, PICTURES),
    ),
    Row("qwen3", "yes", "Qwen3; GGUF qwen3", SHOWN_GGUF),
    Row("qwen3_moe", "yes", "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder; GGUF qwen3moe", (*SHOWN_GGUF, PACKED)),
    Row("qwen3_vl", "partly", f"Qwen3-VL; of GGUF qwen3vl its text; {NO_VIDEO}", (*SHOWN_GGUF, PACKED, PICTURES)),
    Row("qwen3_vl_moe", "partly", f"Qwen3-VL-30B-A3B, 235B-A22B; {NO_VIDEO}", (*SHOWN, PACKED, PICTURES)),
    Row("falcon_h1", "yes", f"Falcon-H1; GGUF falcon-h1; {ON_GPU}", HYBRID_GGUF),
    Row(
        "nemotron_h",
        "yes",
        f"Nemotron-H, Nemotron Nano 2, Nemotron 3; GGUF nemotron_h, nemotron_h_moe; {ON_GPU}",
        (*HYBRID_GGUF, "families:test_layers_named_by_letters_have_the_bits_of_those_named_by_words"),
    ),
    Row("lfm2", "yes", f"LFM2 350M to 2.6B; GGUF lfm2; {ON_GPU}", HYBRID_GGUF),
    Row("lfm2_moe", "yes", f"LFM2-8B-A1B; GGUF lfm2moe; {ON_GPU}", HYBRID_GGUF),
    Row("granitemoehybrid", "yes", f"Granite 4.0 H and Micro; GGUF granitehybrid; {ON_GPU}", HYBRID_GGUF),
    Row("qwen3_next", "yes", f"Qwen3-Next-80B-A3B; GGUF qwen3next; {ON_GPU}", STATES_GGUF),
    Row(
        "qwen3_5",
        "partly",
        f"Qwen3.5 and 3.6, dense; of GGUF, which is that of qwen3_5_text, the text; {NO_VIDEO}; {ON_GPU}",
        (*STATES, PICTURES),
    ),
    Row("qwen3_5_text", "partly", f"the text of qwen3_5; GGUF qwen35; {ON_GPU}", STATES_GGUF),
    Row(
        "qwen3_5_moe",
        "partly",
        f"Qwen3.5-35B-A3B, Qwen3.6-35B-A3B; of GGUF, which is that of qwen3_5_moe_text, the text; {NO_VIDEO}; {ON_GPU}",
        (*STATES, PICTURES),
    ),
    Row("qwen3_5_moe_text", "partly", f"the text of qwen3_5_moe; GGUF qwen35moe; {ON_GPU}", STATES_GGUF),
    Row(
        "gpt_oss",
        "yes",
        f"gpt-oss-20b, gpt-oss-120b; GGUF gpt-oss; {ON_GPU}",
        (*SHOWN_GGUF, PACKED, "families:test_experts_of_mxfp4_are_read_from_their_blocks"),
    ),
    Row("gemma", "yes", "Gemma 1, CodeGemma; GGUF gemma", (*SHOWN_GGUF, PACKED)),
    Row("gemma2", "yes", "Gemma 2; GGUF gemma2", SHOWN_GGUF),
    Row("gemma3_text", "yes", "Gemma 3 1B; GGUF gemma3", SHOWN_GGUF),
    Row("gemma3", "partly", "Gemma 3 4B to 27B, their text; its GGUF is that of gemma3_text", (*SHOWN, PACKED)),
    Row("gemma4_text", "partly", f"Gemma 4's text alone; GGUF gemma4; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row(
        "gemma4",
        "partly",
        f"Gemma 4 E2B to 31B and 26B-A4B, their text; its GGUF is that of gemma4_text; {ON_GPU}",
        (*SHOWN, PACKED),
    ),
    Row("gpt2", "yes", "GPT-2; GGUF gpt2", SHOWN_GGUF),
    Row("phi3", "yes", "Phi-3, Phi-3.5, Phi-4; GGUF phi3", (*SHOWN_GGUF, PACKED)),
    Row("smollm3", "yes", "SmolLM3; GGUF smollm3", (*SHOWN_GGUF, PACKED)),
    Row("seed_oss", "yes", "Seed-OSS; GGUF seed_oss", (*SHOWN_GGUF, PACKED)),
    Row("granite", "yes", "Granite 3 and 4 without experts; GGUF granite", (*SHOWN_GGUF, PACKED)),
    Row("ministral3", "yes", "Ministral 3, Mistral Large 3's text; GGUF mistral3", (*SHOWN_GGUF, PACKED)),
    Row("olmo2", "yes", f"OLMo 2; GGUF olmo2; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("olmo3", "yes", f"OLMo 3; GGUF olmo2; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("starcoder2", "yes", "StarCoder2; GGUF starcoder2", (*SHOWN_GGUF, PACKED)),
    Row("glm", "yes", "GLM-4-9B; GGUF chatglm", (*SHOWN_GGUF, PACKED)),
    Row("glm4", "yes", "GLM-4-0414; GGUF glm4", (*SHOWN_GGUF, PACKED)),
    Row("glm4_moe", "yes", f"GLM-4.5 to 4.7; GGUF glm4moe; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("glm4_moe_lite", "partly", f"GLM-4.7-Flash; GGUF deepseek2; {TWINS}", (*SHOWN_GGUF, PACKED)),
    Row("deepseek_v2", "yes", f"DeepSeek-V2, V2-Lite, V2.5; GGUF deepseek2; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("deepseek_v3", "yes", f"DeepSeek-V3, V3.1, R1; GGUF deepseek2; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("kimi_k2", "partly", f"Kimi K2, the text of K2.5 and K2.6; GGUF deepseek2; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("mistral4", "partly", f"Mistral Small 4's text; GGUF mistral4; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("cohere2", "yes", f"Command R7B, Command A; GGUF cohere2; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("exaone4", "yes", "EXAONE 4.0; GGUF exaone4", (*SHOWN_GGUF, PACKED)),
    Row("ernie4_5", "yes", "ERNIE 4.5 0.3B; GGUF ernie4_5", (*SHOWN_GGUF, PACKED)),
    Row("ernie4_5_moe", "yes", f"ERNIE 4.5 21B-A3B, 300B-A47B; GGUF ernie4_5-moe; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("hunyuan_v1_dense", "yes", f"Hunyuan 0.5B to 7B; GGUF hunyuan-dense; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("hunyuan_v1_moe", "yes", f"Hunyuan-A13B; GGUF hunyuan-moe; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("hy_v3", "yes", f"Hunyuan 3; GGUF hy_v3; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("afmoe", "yes", f"Trinity; GGUF afmoe; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("muse_glimmer", "partly", f"Muse Glimmer's text; GGUF muse-glimmer; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("apertus", "yes", f"Apertus; GGUF apertus; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row(
        "bitnet",
        "yes",
        "BitNet b1.58 2B4T; GGUF bitnet, bitnet-b1.58",
        (*SHOWN_GGUF, PACKED, "bitnet:test_ternary_layers_are_those_of_transformers_but_for_its_rounding_of_inputs"),
    ),
    Row("nemotron", "yes", f"Nemotron-4, Minitron; GGUF nemotron; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("minimax_m2", "yes", f"MiniMax-M2; GGUF minimax-m2; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row("llama4_text", "partly", f"Llama 4, its text; GGUF llama4; {ON_GPU}", (*SHOWN_GGUF, PACKED)),
    Row(
        "the same bits for every type",
        "yes",
        "alone, in company, from a warm prefix and after preemption",
        (
            "kinds:test_I_13_of_every_type_from_a_warm_prefix_and_after_preemption",
            "kinds:test_I_13_in_chunks",
            "kinds:test_I_13_with_two_threads",
        ),
    ),
    Row(
        "native kernels of every type",
        "yes",
        "each record of the cpu backend's tape beside torch_ref, in 28 forms of weights and cache",
        ("tape:test_every_record_agrees_with_torch_ref",),
    ),
    Row(
        "layers for multi-token prediction",
        "partly",
        "of DeepSeek-V3, GLM-4.7-Flash, Qwen3-Next, Qwen3.5 and 3.6, for the drafter `mtp`; DeepSeek-V2, Kimi K2 and "
        "Mistral Small 4 are released without; those in a GGUF file are left out",
        (
            "mtp:test_the_layer_in_the_targets_checkpoint",
            "mtp:test_an_engine_with_the_drafter_says_what_it_says_without",
        ),
    ),
    Row(
        "text of other types",
        "partly",
        "a `text_config` of a type above runs; towers for images or sound are left out, which a line of the log says",
        ("families:test_a_text_below_a_prefix_is_found_and_towers_are_left_out",),
    ),
    Row(
        "other causal types of transformers",
        "partly",
        "by transformers' own code, one row at a time: `--model-impl`; `make test-zoo IMPL=transformers` counts them",
        ("by transformers:test_a_type_is_right_in_every_company",),
    ),
)
VECTORS = (
    Row(
        "sentence-transformers: Pooling, Dense, Normalize",
        "partly",
        "all six kinds of pooling, or several side by side; layers in sequence; length one where the files say so",
        (
            "sentences:test_a_layer_behind_the_pooling",
            "sentences:test_kinds_of_pooling_and_several_side_by_side",
            "sentences:test_vectors_have_length_one_where_the_files_say_so",
            "sentences:test_layers_that_are_not_computed_are_refused",
        ),
    ),
    Row(
        "encoders as GGUF files",
        "partly",
        "architectures bert, nomic-bert and gemma-embedding, pooling by the file; cuda by its twins",
        (
            "gguf encoders:test_floats_have_the_bits_of_safetensors",
            "gguf encoders:test_blocks_are_near_the_floats",
            "gguf encoders:test_the_files_kind_of_pooling",
            "gguf encoders:test_embeddinggemma_with_its_layers_behind_the_pooling",
            "gguf tokenizers:test_unigrams_are_those_of_sentencepiece",
        ),
    ),
    Row(
        "Qwen3-Embedding",
        "yes",
        "the last token's vector, the instruction as the prompt `query`; weights without an output head",
        (
            "sentences:test_a_decoder_with_the_files_of_qwen3_embedding",
            "sentences:test_weights_without_a_head_are_refused_where_no_file_speaks_of_vectors",
        ),
    ),
    Row(
        "embeddinggemma",
        "partly",
        "gemma3_text with use_bidirectional_attention; cuda by its twins",
        (
            "encoders:test_a_decoder_that_sees_both_ways_is_an_encoder",
            "encoders:test_gemmas_vectors_by_packed_weights",
        ),
    ),
    Row(
        "sentence-transformers: prompts, likeness, truncate_dim",
        "yes",
        "`prompt_name` and `input_type` of `/v1/embeddings`, `LLM.embed(prompt_name=...)`; cosine and dot",
        (
            "sentences:test_prompts_are_put_before_texts",
            "sentences:test_likeness_as_the_files_have_it",
            "sentences:test_the_files_cut_vectors",
        ),
    ),
    Row(
        "SPLADE",
        "partly",
        "`/embed_sparse`, `/pooling`, scores; seven types of encoders with `SpladePooling`; cuda by its twins",
        (
            "sparse:test_weights_are_those_of_transformers_logits",
            "sparse:test_texts_are_compared_by_the_dot_product",
            "served sparse:test_embed_sparse_has_the_weights_that_are_not_0",
        ),
    ),
    Row(
        "ColBERT",
        "partly",
        "PyLate's, sentence-transformers' and ColBERT's own files; MaxSim over all tokens, without [MASK] expansion",
        (
            "colbert:test_rows_and_scores_are_those_of_transformers",
            "colbert:test_the_files_of_colbert_itself",
            "served colbert:test_documents_are_ranked_by_maxsim",
        ),
    ),
    Row("rerankers", "yes", "cpu and torch_ref", ("classes:test_a_cross_encoder_scores_pairs_at_every_door",)),
    Row("classifiers", "yes", "cpu and torch_ref", ("classes:test_a_classifier_names_classes_at_every_door",)),
)
