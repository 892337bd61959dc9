"""The control of each row of docs/security.md and docs/reliability.md, as a snippet of the code, and what is there
without it: `tests.campaigns.rows` replaces the one by the other, and the row's own test must fail.
"""

from __future__ import annotations

from typing import NamedTuple


class Removal(NamedTuple):
    """`original` stands once in `file`; `test` is one that the row names, as path::name below tests/."""

    row: str
    file: str
    original: str
    replacement: str
    test: str


SRC = "src/headrace/"

SECURITY = [
    Removal(
        "S-01",
        SRC + "protocol/frames.py",
        "msgspec.msgpack.Decoder(ToEngine)",
        "msgspec.msgpack.Decoder()",
        "protocol/test_transport.py::test_S_01_unknown_tags_types_and_pickles_are_refused",
    ),
    Removal(
        "S-02",
        SRC + "engine/links.py",
        "        server_end, engine_end = socket.socketpair()\n",
        "        server_end, engine_end = socket.socketpair()\n"
        '        self._open_to_all = socket.create_server(("127.0.0.1", 0))\n',
        "security/test_sockets.py::test_S_02_only_the_declared_socket_listens",
    ),
    Removal(
        "S-03",
        SRC + "checkpoint/mapped.py",
        "        if pickled:\n",
        '        if pickled:\n            __import__("pickle").loads((self.directory / pickled[0]).read_bytes())\n',
        "checkpoint/test_loader.py::test_S_03_pickled_weights_are_refused_and_not_opened",
    ),
    Removal(
        "S-04",
        SRC + "checkpoint/mapped.py",
        "    if model_type in known:\n",
        '    if model_type in known or "auto_map" in config:\n',
        "checkpoint/test_loader.py::test_S_04_an_unknown_model_with_code_is_refused",
    ),
    Removal(
        "S-05",
        SRC + "checkpoint/mapped.py",
        "    if shape != expected:\n"
        '        raise CheckpointError(f"{name} has shape {list(shape)}, the config makes it {list(expected)}")\n',
        '    assert shape == expected, f"{name} has shape {list(shape)}, the config makes it {list(expected)}"\n',
        "checkpoint/test_loader.py::test_S_05_refusals_survive_python_O",
    ),
    Removal(
        "S-06",
        SRC + "text/tools/reader.py",
        "        self.final = final\n\n    @contextlib",
        '        self.final = final or eval("False")\n\n    @contextlib',
        "laws/test_layers.py::test_law_is_kept",
    ),
    Removal(
        "S-07",
        SRC + "text/sandbox.py",
        "    env = ImmutableSandboxedEnvironment(\n",
        "    env = jinja2.Environment(\n",
        "text/test_sandbox.py::test_S_07_nothing_gets_out",
    ),
    Removal(
        "S-08",
        SRC + "text/sandbox.py",
        "            if size > MAX_OUTPUT:\n",
        "            if not size:\n",
        "text/test_sandbox.py::test_S_08_bombs_are_stopped",
    ),
    Removal(
        "S-09",
        SRC + "text/grammar_sandbox.py",
        "        build_matcher(tokenizer, grammar, constraint)\n",
        "",
        "text/test_grammars.py::test_S_09_hostile_constraints_are_taken_or_refused_and_nothing_else",
    ),
    Removal(
        "S-10",
        SRC + "text/tools/reader.py",
        "        self.base, self.text, self.at = self.position, self.text[self.at :] + text, 0\n",
        "        self.text = self.text + text\n",
        "text/tools/test_parsers.py::test_S_10_the_work_grows_as_the_text",
    ),
    Removal(
        "S-11",
        SRC + "protocol/bounds.py",
        "        if not is_number or not self.low <= number <= self.high:",
        "        if not is_number:",
        "protocol/test_bounds.py::test_S_11_hostile_values_are_refused",
    ),
    Removal(
        "S-12",
        SRC + "sampling/sampler.py",
        "    if not np.isfinite(x[best]):\n",
        "    if x is None:\n",
        "sampling/test_sampler.py::test_S_12_non_finite_rows_are_refused",
    ),
    Removal(
        "S-13",
        SRC + "core/requests.py",
        "            if not 0 <= token_id < info.vocab_size:\n",
        "            if not 0 <= token_id:\n",
        "serve/test_refusals.py::test_S_13_token_ids_are_checked_against_the_models_width",
    ),
    Removal(
        "S-14",
        SRC + "protocol/beam.py",
        "        if name not in KEPT and getattr(params",
        "        if not name and getattr(params",
        "security/test_combinations.py::test_S_14_any_two_features_together_are_answered_or_refused",
    ),
    Removal(
        "S-15",
        SRC + "text/templates.py",
        '            raise RequestError(f"{field}[{i}].type", part.get("type"), "text: nothing else is read")\n',
        '            part = {"text": str(part)}\n',
        "security/test_rejected.py::test_S_15_no_route_takes_tensors_or_media",
    ),
    Removal(
        "S-16",
        SRC + "serve/routing.py",
        "import msgspec\n",
        "import urllib.request\n\nimport msgspec\n",
        "security/test_paths.py::test_S_16_S_35_nothing_that_serves_can_fetch",
    ),
    Removal(
        "S-17",
        SRC + "serve/gates/limits.py",
        'if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):\n',
        'if headers.get(b"content-encoding") == b"none":\n',
        "security/test_http.py::test_S_17_compressed_bodies_are_refused_unread_on_every_route",
    ),
    Removal(
        "S-18",
        SRC + "serve/gates/auth.py",
        'path.startswith(_INFER_UNDER) else "admin"\n',
        'path.startswith(_INFER_UNDER) else "infer"\n',
        "security/test_keys.py::test_S_18_each_class_of_keys_opens_its_own_routes_only",
    ),
    Removal(
        "S-19",
        SRC + "serve/gates/calls.py",
        "        _check_size(scope)\n",
        "",
        "security/test_http.py::test_S_19_headers_are_bounded_on_every_route",
    ),
    Removal(
        "S-20",
        SRC + "serve/gates/limits.py",
        "    if len(value) != len(pairs):\n",
        "    if not pairs and value:\n",
        "security/test_http.py::test_S_20_a_body_that_is_right_but_for_its_json_is_refused_on_every_route",
    ),
    Removal(
        "S-21",
        SRC + "serve/storage/store.py",
        "return entry if entry is not None and tenants.may_see(entry.owner) else None\n",
        "return entry\n",
        "security/test_tenants.py::test_S_21_what_one_key_keeps_is_not_there_for_others",
    ),
    Removal(
        "S-22",
        SRC + "engine/logs.py",
        "    return _CONTROL.sub(",
        "    return text or _CONTROL.sub(",
        "security/test_logs.py::test_S_22_no_line_is_forged",
    ),
    Removal(
        "S-23",
        SRC + "core/prefix.py",
        'return self._digest(b"root", salt.encode("utf-8", "surrogatepass"), self._fingerprint)',
        'return self._digest(b"root", salt.encode("utf-8", "surrogatepass"))',
        "core/test_prefix_cache.py::test_S_23_every_part_of_the_key_changes_it",
    ),
    Removal(
        "S-24",
        SRC + "engine/tenants.py",
        ".hexdigest()[:32] + salt if name else salt\n",
        ".hexdigest()[:0] + salt if name else salt\n",
        "security/test_tenants.py::test_S_24_probing_anothers_prefix_finds_nothing",
    ),
    Removal(
        "S-25",
        SRC + "text/inputs.py",
        "            request_id=new_request_id(),\n",
        '            request_id="same",\n',
        "security/test_tenants.py::test_S_25_two_callers_with_one_id_are_two",
    ),
    Removal(
        "S-26",
        SRC + "core/tables.py",
        "            self.copies.append((shared[-1], blocks[0]))\n        seq.block_table",
        "        seq.block_table",
        "core/test_simulation.py",
    ),
    Removal(
        "S-27",
        SRC + "gguf.py",
        "        if size > num_left:\n",
        "        if size < 0:\n",
        "formats/gguf/test_fuzz.py::test_S_27_C_6_damaged_models_are_read_or_refused",
    ),
    Removal(
        "S-28",
        SRC + "checkpoint/mapped.py",
        '        if stated is not None and str(stated).removeprefix("torch.") not in STATED_DTYPES:\n',
        "        if stated is False:\n",
        "checkpoint/test_loader.py::test_S_28_a_config_that_makes_no_sense_is_refused",
    ),
    Removal(
        "S-28",
        SRC + "serve/app.py",
        "            hub.check_field(path, ours, params[ours], theirs)\n",
        "            continue\n",
        "serve/test_operations.py::test_S_28_advice_that_no_request_may_follow_is_refused_at_the_start",
    ),
    Removal(
        "S-28",
        SRC + "hub.py",
        '        check_field(path, "stop_token_ids", listed, "eos_token_id")\n',
        "",
        "test_hub.py::test_S_28_eos_ids_are_checked_as_those_of_a_request",
    ),
    Removal(
        "S-28",
        SRC + "text/tokenizer.py",
        "        if not isinstance(name, str) or not isinstance(template, str) or not _is_unicode(template):\n",
        "        if name is None:\n",
        "text/test_tokenizer_files.py::test_S_28_chat_templates_that_fail_each_chat_are_refused_at_the_start",
    ),
    Removal(
        "S-30",
        SRC + "protocol/frames.py",
        "            if length > self._max_frame_bytes:\n",
        "            if length < 0:\n",
        "protocol/test_transport.py::test_a_length_above_the_cap_is_refused_before_it_is_read",
    ),
    Removal(
        "S-31",
        SRC + "core/scheduler.py",
        "        if seq is None or seq.status is Status.FINISHED:\n            return False\n",
        "",
        "engine/test_client.py::test_R_05_aborts_that_hit_nothing_harm_nobody",
    ),
    Removal(
        "S-32",
        SRC + "engine/client.py",
        "            verify(request, self.info)\n",
        "            self._enter(request, RequestStream(requests, self.abort), 0, 0.0, 0)\n"
        "            verify(request, self.info)\n",
        "security/test_rejected.py::test_S_32_what_is_refused_at_any_stage_leaves_nothing",
    ),
    Removal(
        "S-33",
        SRC + "serve/gates/calls.py",
        "        self._check_host(headers)\n",
        "",
        "security/test_browsers.py::test_S_33_a_name_that_was_bound_to_this_machine_opens_nothing",
    ),
    Removal(
        "S-35",
        SRC + "hub.py",
        "        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))\n",
        "        import os\n        import urllib.request\n\n        from huggingface_hub import constants\n\n"
        '        place = f"{constants.ENDPOINT}/{model}/resolve/main/config.json"\n'
        '        token = {"authorization": "Bearer " + os.environ["HF_TOKEN"]}\n'
        "        urllib.request.urlopen(urllib.request.Request(place, headers=token)).read()\n"
        "        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))\n",
        "security/test_hub.py::test_S_35_the_token_is_sent_to_no_other_host",
    ),
    Removal(
        "S-36",
        "requirements.lock",
        "uvicorn==",
        "uvicorn==9",
        "security/test_supply.py::test_S_36_the_lock_has_all_that_is_needed_with_hashes",
    ),
    Removal(
        "S-38",
        SRC + "backends/cpu/matrix.py",
        '        if self.kind != "f" and (self.num_in > MAX_IN or self.group % 8 or self.group > MAX_GROUP):\n',
        '        if self.kind == "nothing":\n',
        "backends/test_matrix.py::test_what_would_overrun_the_kernels_is_refused",
    ),
    Removal(
        "S-40",
        SRC + "engine/tenants.py",
        "    name = current().name\n    return hashlib",
        '    name = "all"\n    return hashlib',
        "security/test_interference.py::test_S_40_control_a_cache_without_a_salt_is_noticed",
    ),
]

RELIABILITY = [
    Removal(
        "R-01",
        SRC + "engine/resumption.py",
        "resume_token_ids=list(self.delivered), resume_state",
        "resume_token_ids=[], resume_state",
        "serve/test_faults.py::test_a_killed_engine_is_a_pause_in_the_streams",
    ),
    Removal(
        "R-02",
        SRC + "engine/watchdog.py",
        "return bool(self.timeout) and (self.frozen >= self.timeout or self.silent >= PATIENCE * self.timeout)",
        "return False",
        "engine/test_watchdog.py::test_R_02_one_that_does_nothing_is_ended_in_time",
    ),
    Removal(
        "R-03",
        SRC + "engine/watchdog.py",
        "        passed = min(passed, 2 * self.interval)\n",
        "",
        "engine/test_watchdog.py::test_R_03_a_watcher_that_stood_still_itself_blames_nobody",
    ),
    Removal(
        "R-04",
        SRC + "serve/routing.py",
        '        raise ClientGoneError("the client hung up")\n',
        "        return await task\n",
        "serve/test_faults.py::test_R_04_a_client_that_leaves_frees_its_blocks",
    ),
    Removal(
        "R-05",
        SRC + "core/scheduler.py",
        "        if seq is None or seq.status is Status.FINISHED:\n            return False\n",
        "        if seq is None and self.running:\n            seq = self.running[0]\n"
        "        if seq is None or seq.status is Status.FINISHED:\n            return False\n",
        "engine/test_client.py::test_R_05_aborts_that_hit_nothing_harm_nobody",
    ),
    Removal(
        "R-06",
        SRC + "core/scheduler.py",
        "            if not self.steps.hold(member):\n                self.tables.release(member)\n",
        "            self.tables.release(member)\n",
        "core/test_simulation.py",
    ),
    Removal(
        "R-07",
        SRC + "core/tables.py",
        "        if blocks is None:\n            pool.release(shared)\n            return False\n",
        "        if blocks is None:\n            return False\n",
        "core/test_simulation.py",
    ),
    Removal(
        "R-08",
        SRC + "core/scheduler.py",
        "candidates = [s for s in self.running if s.num_preemptions < MAX_PREEMPTIONS and not self.steps]",
        "candidates = [s for s in self.running if not self.steps]",
        "core/test_simulation.py",
    ),
    Removal(
        "R-09",
        SRC + "engine/load.py",
        "    if num_blocks >= least:\n",
        "    if num_blocks:\n",
        "engine/test_compose.py::test_R_09_the_pool_holds_the_told_context_or_there_is_no_engine",
    ),
    Removal(
        "R-10",
        SRC + "engine/admission.py",
        "        if num and len(self._names) > 1 and (",
        "        if num < 0 and (",
        "engine/test_admission.py::test_R_10_each_callers_share_is_at_least_what_is_left",
    ),
    Removal(
        "R-11",
        SRC + "core/scheduler.py",
        "        budget = self.max_num_batched_tokens - len(ready)\n",
        "        budget = self.max_num_batched_tokens\n",
        "core/test_scheduler.py::test_R_11_gaps_of_one_come_before_long_prompts",
    ),
    Removal(
        "R-12",
        SRC + "engine/admission.py",
        "        if len(works) > room or sum(works) > room_tokens:\n",
        "        if len(works) > room:\n",
        "engine/test_admission.py::test_R_12_both_bounds_hold",
    ),
    Removal(
        "R-13",
        SRC + "engine/client.py",
        "            stream.arm(asyncio.get_running_loop().call_later(deadline - now, self._expire, stream))\n",
        "            pass\n",
        "serve/gates/test_deadlines.py::test_R_13_time_that_runs_out_while_tokens_come_is_an_error",
    ),
    Removal(
        "R-14",
        SRC + "engine/request_stream.py",
        "            self._pending[index].merge(delta)\n",
        "            self._pending[index] = delta\n",
        "engine/test_client.py::test_R_14_deltas_of_a_slow_reader_are_merged",
    ),
    Removal(
        "R-15",
        SRC + "serve/routing.py",
        "                await self._send(send, error_event(error, self._api), more=True)\n",
        "                pass\n",
        "serve/test_faults.py::test_R_15_a_stream_that_breaks_ends_with_an_error_and_no_done",
    ),
    Removal(
        "R-16",
        SRC + "text/tokenizer.py",
        '        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")\n',
        '        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")\n',
        "serve/test_refusals.py::test_R_16_every_chunk_is_strict_json",
    ),
    Removal(
        "R-17",
        SRC + "runner/faults.py",
        '        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":\n',
        "        if error is not None:\n",
        "e2e/test_engine_faults.py::test_R_17_an_exception_ends_whose_it_is_and_nobody_else",
    ),
    Removal(
        "R-18",
        SRC + "core/tables.py",
        "        seq.num_computed = num_shared\n",
        "        seq.num_computed = min(num_shared + num_shared % 2, len(seq.tokens) - 1)\n",
        "e2e/test_law.py::test_I_13_cold_and_warm_prefix_cache",
    ),
    Removal(
        "R-20",
        SRC + "runner/verification.py",
        '                    result.errors[i] = f"structured_output_error: {error}"\n        return masks\n',
        "                    masks.pop(i, None)\n        return masks\n",
        "e2e/test_engine_faults.py::test_R_20_a_grammar_that_fails_ends_its_own_request",
    ),
    Removal(
        "R-21",
        SRC + "engine/links.py",
        "        transport.max_size = READ_BYTES\n",
        "        pass\n",
        "engine/test_memory.py::test_R_21_a_read_takes_no_more_than_it_may",
    ),
    Removal(
        "R-22",
        SRC + "core/scheduler.py",
        "        return stats_of(self.counters, self.pool, self.searches, len(self.waiting))\n",
        "        return stats_of(self.counters, self.pool, self.searches, self.num_added)\n",
        "core/test_scheduler.py::test_R_22_gauges_are_the_state_and_return_to_zero",
    ),
    Removal(
        "R-23",
        SRC + "serve/app.py",
        "        self._lifespan.drain(self._drain_seconds)\n",
        "",
        "serve/test_faults.py::test_R_23_streams_that_outlast_the_drain_end_with_an_error",
    ),
    Removal(
        "R-25",
        SRC + "runner/faults.py",
        '            if num_rows == 1:\n                return ""\n',
        "",
        "e2e/test_engine_faults.py::test_R_25_a_shortage_that_leaves_no_room_for_one_row_is_nobodys_fault",
    ),
    Removal(
        "R-26",
        SRC + "sampling/sampler.py",
        "        positions = [open_rows[i].row.position for i in few]\n",
        "        positions = [open_rows[i].row.position + i for i in few]\n",
        "e2e/test_law.py::test_I_13_in_a_batch_of_32_with_strangers",
    ),
    Removal(
        "R-27",
        SRC + "engine/client.py",
        "        return self._alive and self._proven\n",
        "        return self._alive\n",
        "serve/test_operations.py::test_R_27_not_ready_before_a_token_was_made",
    ),
    Removal(
        "R-28",
        SRC + "engine/logs.py",
        "            except OSError:\n                self._drop()\n",
        "            except OSError:\n                pass\n",
        "serve/storage/test_disk.py::test_R_28_a_log_on_a_full_disk_is_dropped_and_counted",
    ),
]

REMOVALS = [*SECURITY, *RELIABILITY]
