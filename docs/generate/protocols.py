"""The constants of the VAE's protocols, beside each other."""

from __future__ import annotations

from dataclasses import fields

from evidence import Evidence

from gapped.comparison.table import NOTHING, Entry, Table
from gapped_lab.report.rendering import to_markdown
from gapped_lab.tasks import vae_protocol

NAMES = ("paper-30x10", "plain-30x10", "paper-32x64", "coupled-32x64")
# The meaning of each constant, where its name does not say it.
WORDS = {
    "latents": "categorical variables an image",
    "categories": "categories of each",
    "hidden": "hidden widths of the encoder; the decoder mirrors them",
    "slope": "slope of the leaky ReLU between layers; 0 is the ReLU",
    "rectified_logits": "ReLU on the logits",
    "binarised": "pixels drawn anew at every access",
    "batch": "batch size",
    "learning_rate": "learning rate of Adam",
    "train_images": "training images, from the first; – is all",
    "glorot": "Glorot initialisation with zero biases, instead of torch's",
    "centred": "encoder input less the mean image",
    "signed": "decoder input 2 z - 1",
    "mean_output": "last bias starts at the logit of the mean image",
    "prior_rate": "learning rate of the prior; – is a uniform prior",
    "sampled_divergence": "divergence sampled, instead of its closed form",
    "bound_samples": "samples in the test bound",
}
# Constants of other VAEs: patches and selected pixels, RAdam and AdamW.
OTHERS = ("name", "patch", "selects", "rectified_adam", "weight_decay")


def protocols(_: Evidence) -> str:
    """A row for each constant."""
    kinds = [vae_protocol(name) for name in NAMES]
    names = [field.name for field in fields(kinds[0]) if field.name not in OTHERS]
    body = [
        (Entry(WORDS.get(name, name.replace("_", " "))), *(_constant(getattr(k, name)) for k in kinds))
        for name in names
    ]
    return to_markdown(Table(("constant", *NAMES), tuple(body)))


def _constant(value: object) -> Entry:
    if isinstance(value, bool) or value is None:
        return Entry({True: "yes", False: "no", None: NOTHING}[value])
    if isinstance(value, tuple):
        return Entry("–".join(map(str, value)))
    form = ",d" if isinstance(value, int) else "g" if isinstance(value, float) else ""
    return Entry(format(value, form))
