"""The language of a text of any length, from the bytes of its UTF-8."""

from typing import Any

from penstock.core.application import Application
from penstock.core.dim import Dim
from penstock.core.spec import Array, TensorSpec
from penstock.core.texts.text import ByteText

MAX_BYTES = 512
# By the codes of Django's translations; those of a country or a script count as their language.
LANGUAGES = {
    "af": "Afrikaans",
    "am": "Amharic",
    "ar": "Arabic",
    "ast": "Asturian",
    "az": "Azerbaijani",
    "be": "Belarusian",
    "bg": "Bulgarian",
    "bn": "Bengali",
    "br": "Breton",
    "bs": "Bosnian",
    "ca": "Catalan",
    "ckb": "Central Kurdish",
    "cs": "Czech",
    "cy": "Welsh",
    "da": "Danish",
    "de": "German",
    "dsb": "Lower Sorbian",
    "el": "Greek",
    "en": "English",
    "eo": "Esperanto",
    "es": "Spanish",
    "et": "Estonian",
    "eu": "Basque",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "ga": "Irish",
    "gd": "Scottish Gaelic",
    "gl": "Galician",
    "he": "Hebrew",
    "hi": "Hindi",
    "hr": "Croatian",
    "hsb": "Upper Sorbian",
    "hu": "Hungarian",
    "hy": "Armenian",
    "ia": "Interlingua",
    "id": "Indonesian",
    "ig": "Igbo",
    "io": "Ido",
    "is": "Icelandic",
    "it": "Italian",
    "ja": "Japanese",
    "ka": "Georgian",
    "kab": "Kabyle",
    "kk": "Kazakh",
    "km": "Khmer",
    "kn": "Kannada",
    "ko": "Korean",
    "ky": "Kyrgyz",
    "lb": "Luxembourgish",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "mk": "Macedonian",
    "ml": "Malayalam",
    "mn": "Mongolian",
    "mr": "Marathi",
    "ms": "Malay",
    "my": "Burmese",
    "nb": "Norwegian Bokmål",
    "ne": "Nepali",
    "nl": "Dutch",
    "nn": "Norwegian Nynorsk",
    "os": "Ossetic",
    "pa": "Punjabi",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sq": "Albanian",
    "sr": "Serbian",
    "sv": "Swedish",
    "sw": "Swahili",
    "ta": "Tamil",
    "te": "Telugu",
    "tg": "Tajik",
    "th": "Thai",
    "tk": "Turkmen",
    "tr": "Turkish",
    "tt": "Tatar",
    "udm": "Udmurt",
    "ug": "Uyghur",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "uz": "Uzbek",
    "vi": "Vietnamese",
    "zh": "Chinese",
}
CODES, LABELS = tuple(LANGUAGES), tuple(LANGUAGES.values())
# Languages that an answer lists.
LISTED = 3


def reply(shares: Array) -> dict[str, Any]:
    """The likeliest language, and some that are nearly as likely."""
    best = shares.argsort()[::-1][:LISTED].tolist()
    return {
        "language": LABELS[best[0]],
        "code": CODES[best[0]],
        "probability": round(float(shares[best[0]]), 4),
        "likeliest": {LABELS[at]: round(float(shares[at]), 4) for at in best},
    }


app = Application(
    name="text",
    description=f"Tells the language of a text, one of {len(LABELS)}.",
    inputs={
        "text": TensorSpec(
            dtype="uint8",
            shape=(Dim("bytes", max=MAX_BYTES),),
            meaning="bytes of a text in UTF-8",
            units="0..255",
        )
    },
    output=TensorSpec(
        name="languages",
        dtype="float32",
        shape=(len(LABELS),),
        meaning="probability of each language",
        units="probability",
        labels=LABELS,
    ),
    decode=ByteText(tensor="text", max_bytes=MAX_BYTES, cut=True),
    accepts=("text/plain",),
    max_body_bytes=1 << 16,
    reply=reply,
    model="penstock.apps.text.model:network",
    recipe="penstock.apps.text.recipe:recipe",
)
