"""A beam search as it stands in the books, for the engine's to be compared with: whole lists, no caches, no blocks.

Written from transformers' documentation of `num_beams`, `length_penalty` and `early_stopping`, and from Vijayakumar et
al. (arXiv:1610.02424), Algorithm 1, for groups. It looks at every token of the vocabulary after every beam.
"""

from collections.abc import Callable

from headrace.protocol.beam import BeamSearchParams

Tops = Callable[[list[int]], tuple[tuple[int, float], ...]]
Answer = tuple[float, float, list[int]]


def plain_beams(tops: Tops, params: BeamSearchParams, stop_ids: frozenset[int], max_tokens: int) -> list[Answer]:
    """(score, sum of log-probabilities, token ids) of the `n` best answers, best first.

    `tops(token_ids)` are all tokens with their log-probabilities after an answer's beginning.
    """
    groups, width = params.num_beam_groups, params.beam_width // params.num_beam_groups
    running: list[list[Answer]] = [[(0.0, 0.0, [])] for _ in range(groups)]
    done: list[list[Answer]] = [[] for _ in range(groups)]
    for length in range(1, max_tokens + 1):
        chosen_ids: list[int] = []
        for g in range(groups):
            if not running[g]:
                continue
            every = []
            for place, (ranked, total, ids) in enumerate(running[g]):
                for token, logprob in tops(ids):
                    worth = logprob - params.diversity_penalty * chosen_ids.count(token) + ranked
                    every.append((-worth, place, token, logprob + total))
            every.sort()
            every = every[: max(2, 1 + len(stop_ids)) * width]
            for minus, place, token, total in every[:width]:
                if token in stop_ids or length == max_tokens:
                    score = -minus / length**params.length_penalty
                    done[g].append((score, total, [*running[g][place][2], token]))
            # Of equals the first stays first.
            done[g] = sorted(done[g], key=lambda answer: -answer[0])[:width]
            going = [(-m, total, [*running[g][place][2], token]) for m, place, token, total in every]
            running[g] = [beam for beam in going if beam[2][-1] not in stop_ids][:width]
            chosen_ids += [beam[2][-1] for beam in running[g]]
            if running[g] and len(done[g]) == width:
                reach = max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
                hope = running[g][0][0] / reach**params.length_penalty
                if params.early_stopping is True or hope <= done[g][-1][0]:
                    running[g] = []
    answers = sorted((answer for group in done for answer in group), key=lambda answer: -answer[0])
    return answers[: params.num_answers]
