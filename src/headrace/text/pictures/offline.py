"""Pictures of calls without a server: vLLM's `multi_modal_data`, and the pictures in conversations. Held by `LLM`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.protocol.errors import RequestError
from headrace.protocol.pictures import Picture
from headrace.text.inputs import IMAGES
from headrace.text.pictures.forms import read_form
from headrace.text.pictures.marks import PictureInput
from headrace.text.pictures.reading import Cut, PictureReader
from headrace.text.tokenizer import Tokenizer


class OfflinePictures:
    """Reads pictures for a model. `reader`: None for a model that reads text only."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer | None,
        tower: str,
        limits: Mapping[str, int] | None = None,
        projector: Path | None = None,
    ) -> None:
        form = read_form(directory, tokenizer, projector) if tower and tokenizer is not None else None
        self.reader = None if form is None else PictureReader(form, limits)
        self._tokenizer = tokenizer

    def expanded(self, prompt: Any) -> tuple[Any, Sequence[Picture]]:
        """Return a prompt for `inputs.prompt_ids`, and its pictures: of a dict with `multi_modal_data`, whose text has
        the model's mark for each, or with `pictures`, as `rendered` makes it. Raises `RequestError`."""
        if not isinstance(prompt, dict) or not prompt.get(IMAGES):
            return prompt, prompt.get("pictures") or () if isinstance(prompt, dict) else ()
        sources, text = prompt[IMAGES], prompt.get("prompt")
        if not isinstance(sources, dict) or set(sources) != {"image"}:
            raise RequestError(IMAGES, sources, 'a dict {"image": ...}: videos and sounds are not read')
        if not isinstance(text, str):
            raise RequestError("prompt", text, "a text with the model's mark for each picture")
        images = sources["image"]
        images = list(images) if isinstance(images, Sequence) and not isinstance(images, (bytes, str)) else [images]
        prompt = self._placed(text, [self._cut(image, f"{IMAGES}.image[{i}]") for i, image in enumerate(images)], True)
        return prompt, prompt["pictures"]

    def rendered(self, text: str, inputs: Sequence[PictureInput]) -> dict[str, Any]:
        """Return a rendered conversation with these pictures as a prompt for `expanded`. Raises `RequestError`."""
        # The template has written the special tokens already.
        return self._placed(text, [self._required().read(each) for each in inputs], False)

    def _placed(self, text: str, cuts: Sequence[Cut], add_special_tokens: bool) -> dict[str, Any]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError("prompt", text, "token ids, for the engine runs without a tokenizer")
        if cuts:
            self._required().check_number(len(cuts), IMAGES)
            text = self._required().text(text, cuts, "prompt")
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        pictures: list[Picture] = []
        if cuts:
            reader = self._required()
            row_id = tokenizer.token_to_id(reader.form.words.token)
            pictures = reader.place(token_ids, -1 if row_id is None else row_id, cuts, "prompt")
        return {"prompt": text, "prompt_token_ids": token_ids, "pictures": pictures}

    def _required(self) -> PictureReader:
        if self.reader is None:
            raise RequestError(IMAGES, "a picture", "left out: the model reads text only")
        return self.reader

    def _cut(self, image: Any, field: str) -> Cut:
        """Return a picture of Pillow's, the bytes of a file, or a data URL, decoded."""
        reader = self._required()
        if isinstance(image, str):
            return reader.read(PictureInput(field, image, "image_url"))
        if hasattr(image, "save"):
            file = io.BytesIO()
            image.save(file, "PNG")
            image = file.getvalue()
        if not isinstance(image, bytes):
            raise RequestError(field, type(image).__name__, "a picture of Pillow's, bytes of a file, or a data URL")
        return reader.cut(image, field)

    def close(self) -> None:
        """End the process that decodes."""
        if self.reader is not None:
            self.reader.process.close()
