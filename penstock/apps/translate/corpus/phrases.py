"""Sentences made by a grammar of both languages at once: numbers, times, and what one says and hears on a telephone."""

import random
from collections.abc import Callable, Iterator

from penstock.apps.translate.corpus.pairs import Pair

# An English phrase and its translation.
Both = tuple[str, str]

_SMALL = (
    "zero cero|one uno|two dos|three tres|four cuatro|five cinco|six seis|seven siete|eight ocho|nine nueve|ten diez|"
    "eleven once|twelve doce|thirteen trece|fourteen catorce|fifteen quince|sixteen dieciséis|seventeen diecisiete|"
    "eighteen dieciocho|nineteen diecinueve"
)
_TENS = (
    "twenty veinte|thirty treinta|forty cuarenta|fifty cincuenta|sixty sesenta|seventy setenta|eighty ochenta|"
    "ninety noventa"
)
_TWENTIES = [
    "veintiuno",
    "veintidós",
    "veintitrés",
    "veinticuatro",
    "veinticinco",
    "veintiséis",
    "veintisiete",
    "veintiocho",
    "veintinueve",
]
_HUNDREDS = [
    "ciento",
    "doscientos",
    "trescientos",
    "cuatrocientos",
    "quinientos",
    "seiscientos",
    "setecientos",
    "ochocientos",
    "novecientos",
]
_ORDINALS = (
    "first primero|second segundo|third tercero|fourth cuarto|fifth quinto|sixth sexto|seventh séptimo|eighth octavo|"
    "ninth noveno|tenth décimo"
)
_DAYS = "Monday lunes|Tuesday martes|Wednesday miércoles|Thursday jueves|Friday viernes|Saturday sábado|Sunday domingo"
_MONTHS = (
    "January enero|February febrero|March marzo|April abril|May mayo|June junio|July julio|August agosto|"
    "September septiembre|October octubre|November noviembre|December diciembre"
)
# English | Spanish | gender and number.
_THINGS = """
account number|número de cuenta|m
card number|número de tarjeta|m
customer number|número de cliente|m
phone number|número de teléfono|m
ticket number|número de boleto|m
order number|número de pedido|m
room number|número de habitación|m
access code|código de acceso|m
area code|código de área|m
postal code|código postal|m
security code|código de seguridad|m
password|contraseña|f
secret word|palabra secreta|f
date of birth|fecha de nacimiento|f
name|nombre|m
last name|apellido|m
address|dirección|f
appointment|cita|f
flight|vuelo|m
reservation|reserva|f
subscription|suscripción|f
invoice|factura|f
payment|pago|m
balance|saldo|m
language|idioma|m
recording|grabación|f
greeting|saludo|m
line|línea|f
message|mensaje|m
note|nota|f
mailbox|buzón|m
folder|carpeta|f
contact|contacto|m
call|llamada|f
list|lista|f
meeting|reunión|f
guest|invitado|m
microphone|micrófono|m
volume|volumen|m
alarm|alarma|f
"""
_ACTIONS = """
change|cambiar|cambie|cambiado
delete|borrar|borre|borrado
save|guardar|guarde|guardado
listen to|escuchar|escuche|escuchado
confirm|confirmar|confirme|confirmado
cancel|cancelar|cancele|cancelado
repeat|repetir|repita|repetido
record|grabar|grabe|grabado
send|enviar|envíe|enviado
forward|reenviar|reenvíe|reenviado
check|comprobar|compruebe|comprobado
review|revisar|revise|revisado
move|mover|mueva|movido
add|agregar|agregue|agregado
remove|quitar|quite|quitado
"""
_PAST = {
    "change": "changed", "delete": "deleted", "save": "saved", "listen to": "listened to", "confirm": "confirmed",
    "cancel": "cancelled", "repeat": "repeated", "record": "recorded", "send": "sent", "forward": "forwarded",
    "check": "checked", "review": "reviewed", "move": "moved", "add": "added", "remove": "removed",
}  # fmt: skip
_ENDINGS = """
to talk to an agent|para hablar con un agente
to speak with a person|para hablar con una persona
to hear the options again|para escuchar de nuevo las opciones
to go back to the previous menu|para volver al menú anterior
to return to the main menu|para regresar al menú principal
to continue in English|para continuar en inglés
to continue in Spanish|para continuar en español
to hear more options|para escuchar más opciones
to finish|para terminar
to hang up|para colgar
to leave a message|para dejar un mensaje
to stay on the line|para permanecer en la línea
to skip this step|para omitir este paso
for sales|para ventas
for technical support|para soporte técnico
for opening hours|para el horario de atención
for all other questions|para cualquier otra consulta
"""
_SENTENCES = """
Please hold the line.|Por favor, manténgase en la línea.
Please wait a moment.|Por favor, espere un momento.
Please call back later.|Por favor, vuelva a llamar más tarde.
Please speak after the beep.|Por favor, hable después de la señal.
Please speak slowly.|Por favor, hable despacio.
Please say that again.|Por favor, dígalo otra vez.
Please stay on the line, and we will be with you shortly.|Por favor, permanezca en la línea; le atenderemos en breve.
Thank you for waiting.|Gracias por esperar.
Thanks for your call.|Gracias por su llamada.
Good morning.|Buenos días.
Good afternoon.|Buenas tardes.
Good evening.|Buenas noches.
See you later.|Hasta luego.
You are welcome.|De nada.
How can I help you?|¿En qué puedo ayudarle?
Nobody is available right now.|No hay nadie disponible en este momento.
All our agents are helping other customers.|Todos nuestros agentes están atendiendo a otros clientes.
Your call is very important.|Su llamada es muy importante.
The line is busy.|La línea está ocupada.
We did not understand your answer.|No entendimos su respuesta.
There is no answer.|No contesta nadie.
The office is closed today.|La oficina está cerrada hoy.
Our office opens at nine in the morning.|Nuestra oficina abre a las nueve de la mañana.
You have no new mail.|No tiene correo nuevo.
An error happened. Please start over.|Ocurrió un error. Por favor, comience de nuevo.
This option does not exist.|Esta opción no existe.
"""


def phrase_pairs(count: int, seed: int) -> Iterator[Pair]:
    """Draw sentences.

    Args:
        count: Number of sentences.
        seed: Seed of the choice.
    """
    rng = random.Random(seed)
    kinds: list[Callable[[random.Random], Both]] = [
        _request, _choice, _choice, _state, _number, _time, _date, _how_many, _sentence, _two, _question, _chain,
    ]  # fmt: skip
    for _ in range(count):
        english, spanish = rng.choice(kinds)(rng)
        if rng.random() < 0.2:
            english, spanish = (text.rstrip(".") for text in (english, spanish))
        if rng.random() < 0.1:
            english, spanish = english.lower(), spanish.lower()
        if rng.random() < 0.7:
            english, spanish = _capital(english), _capital(spanish)
        yield Pair(english, spanish, "phrases")


def number(value: int) -> Both:
    """A number from 0 to 999,999 in words."""
    small, tens = _table(_SMALL), _table(_TENS)
    if value < 20:
        return small[value]
    if value < 100:
        english, spanish = tens[value // 10 - 2]
        one, uno = small[value % 10]
        if value % 10 == 0:
            return english, spanish
        return f"{english} {one}", _TWENTIES[value - 21] if value < 30 else f"{spanish} y {uno}"
    if value < 1000:
        english = f"{small[value // 100][0]} hundred"
        if value % 100 == 0:
            return english, "cien" if value == 100 else _HUNDREDS[value // 100 - 1]
        rest = number(value % 100)
        return f"{english} {rest[0]}", f"{_HUNDREDS[value // 100 - 1]} {rest[1]}"
    many = number(value // 1000)
    thousands = f"{many[0]} thousand", "mil" if value < 2000 else f"{_before_noun(many[1])} mil"
    if value % 1000 == 0:
        return thousands
    rest = number(value % 1000)
    return f"{thousands[0]} {rest[0]}", f"{thousands[1]} {rest[1]}"


def _before_noun(spanish: str) -> str:
    if spanish.endswith("veintiuno"):
        return spanish.removesuffix("veintiuno") + "veintiún"
    return spanish.removesuffix("o") if spanish.endswith("uno") else spanish


def _table(text: str) -> list[Both]:
    return [(english, spanish) for english, spanish in (entry.split(" ") for entry in text.split("|"))]


def _rows(text: str) -> list[list[str]]:
    return [line.split("|") for line in text.strip().splitlines()]


def _digit(rng: random.Random, most: int = 9) -> Both:
    value = rng.randint(0, most)
    return number(value) if rng.random() < 0.6 else (str(value), str(value))


def _please(rng: random.Random) -> Both:
    return rng.choice([("please ", "por favor, "), ("please ", "por favor "), ("", "")])


def _enter(rng: random.Random) -> Both:
    return rng.choice([("enter", "introduzca"), ("enter", "ingrese"), ("type", "escriba"), ("say", "diga")])


def _press(rng: random.Random) -> Both:
    return rng.choice([("press", "presione"), ("press", "pulse"), ("dial", "marque"), ("press", "oprima")])


def _key(rng: random.Random) -> Both:
    if rng.random() < 0.7:
        return _digit(rng)
    return rng.choice(
        [("star", "asterisco"), ("the star key", "la tecla asterisco"), ("the hash key", "la tecla numeral"),
         ("pound", "numeral"), ("any key", "cualquier tecla")]
    )  # fmt: skip


def _thing(rng: random.Random) -> tuple[str, str, str]:
    english, spanish, gender = rng.choice(_rows(_THINGS))
    feminine = gender == "f"
    determiner = rng.choice(
        [("your", "su"), ("the", "la" if feminine else "el"), ("this", "esta" if feminine else "este"),
         ("your new", "su nueva" if feminine else "su nuevo"), ("a", "una" if feminine else "un")]
    )  # fmt: skip
    if determiner[0] == "a" and english[0] in "aeiou":
        determiner = "an", determiner[1]
    if determiner[0] == "your new":
        return f"your new {english}", f"{determiner[1]} {spanish}", gender
    return f"{determiner[0]} {english}", f"{determiner[1]} {spanish}", gender


def _request(rng: random.Random) -> Both:
    please, enter, thing = _please(rng), _enter(rng), _thing(rng)
    end = rng.choice(
        [("", ""), (" now", " ahora"), (" again", " otra vez"), (" again", " nuevamente"),
         (" after the beep", " después de la señal"),
         (" and then press the hash key", " y luego presione la tecla numeral"),
         (" or wait for help", " o espere para recibir ayuda")]
    )  # fmt: skip
    return f"{please[0]}{enter[0]} {thing[0]}{end[0]}.", f"{please[1]}{enter[1]} {thing[1]}{end[1]}."


def _purpose(rng: random.Random) -> Both:
    if rng.random() < 0.4:
        english, spanish = rng.choice(_rows(_ENDINGS))
        return english, spanish
    action, thing = rng.choice(_rows(_ACTIONS)), _thing(rng)
    return f"to {action[0]} {thing[0]}", f"para {action[1]} {thing[1]}"


def _choice(rng: random.Random) -> Both:
    press, key, purpose, please = _press(rng), _key(rng), _purpose(rng), _please(rng)
    if rng.random() < 0.5:
        return f"{purpose[0]}, {press[0]} {key[0]}.", f"{purpose[1]}, {press[1]} {key[1]}."
    return f"{please[0]}{press[0]} {key[0]} {purpose[0]}.", f"{please[1]}{press[1]} {key[1]} {purpose[1]}."


def _chain(rng: random.Random) -> Both:
    press = _press(rng)
    parts = [(_digit(rng), _purpose(rng)) for _ in range(rng.randint(2, 4))]
    english = ", ".join(f"{key[0]} {purpose[0]}" for key, purpose in parts[:-1])
    spanish = ", ".join(f"{key[1]} {purpose[1]}" for key, purpose in parts[:-1])
    key, purpose = parts[-1]
    return f"{press[0]} {english}, or {key[0]} {purpose[0]}.", f"{press[1]} {spanish}, o {key[1]} {purpose[1]}."


def _state(rng: random.Random) -> Both:
    action, thing = rng.choice(_rows(_ACTIONS)), _thing(rng)
    past = action[3].removesuffix("o") + "a" if thing[2] == "f" else action[3]
    have, has = rng.choice(
        [("has been", "ha sido"), ("was", "fue"), ("will be", "será"), ("could not be", "no pudo ser")]
    )
    return f"{thing[0]} {have} {_PAST[action[0]]}.", f"{thing[1]} {has} {past}."


def _number(rng: random.Random) -> Both:
    if rng.random() < 0.2:
        return rng.choice(_table(_ORDINALS))
    return number(rng.randint(0, 10 ** rng.randint(1, 6) - 1))


def _time(rng: random.Random) -> Both:
    hour, minute = rng.randint(1, 12), rng.choice([0, 5, 10, 15, 20, 25, 30, 40, 45, 50])
    english, spanish = number(hour)
    if minute:
        english, spanish = f"{english} {number(minute)[0]}", f"{spanish} y {number(minute)[1]}"
    spanish = f"la {spanish.replace('uno', 'una', 1)}" if hour == 1 else f"las {spanish}"
    part = rng.choice(
        [(" in the morning", " de la mañana"), (" in the afternoon", " de la tarde"), (" at night", " de la noche"),
         (" a.m.", " a. m."), (" p.m.", " p. m."), ("", "")]
    )  # fmt: skip
    return f"at {english}{part[0]}", f"a {spanish}{part[1]}"


def _date(rng: random.Random) -> Both:
    day, month, value = rng.choice(_table(_DAYS)), rng.choice(_table(_MONTHS)), rng.randint(2, 31)
    when, time = rng.choice([("today", "hoy"), ("yesterday", "ayer"), ("tomorrow", "mañana")]), _time(rng)
    return rng.choice(
        [day, month, when, (f"on {day[0]}", f"el {day[1]}"), (f"{month[0]} {value}", f"{value} de {month[1]}"),
         (f"{day[0]}, {month[0]} {value}", f"{day[1]}, {value} de {month[1]}"),
         (f"{when[0]} {time[0]}", f"{when[1]} {time[1]}")]
    )  # fmt: skip


def _how_many(rng: random.Random) -> Both:
    unit = rng.choice(
        [("minute", "minuto", "m"), ("second", "segundo", "m"), ("hour", "hora", "f"), ("day", "día", "m"),
         ("new message", "mensaje nuevo", "m"), ("old message", "mensaje antiguo", "m"), ("week", "semana", "f"),
         ("call", "llamada", "f"), ("missed call", "llamada perdida", "f"), ("person", "persona", "f"),
         ("saved message", "mensaje guardado", "m"), ("dollar", "dólar", "m"), ("cent", "centavo", "m")]
    )  # fmt: skip
    value = rng.randint(1, 99)
    english, spanish = number(value) if rng.random() < 0.6 else (str(value), str(value))
    spanish = spanish if spanish.isdigit() else _before_noun(spanish)
    if unit[2] == "f" and spanish.endswith(("un", "ún")):
        spanish = spanish.replace("ún", "una") if spanish.endswith("ún") else spanish + "a"
    things = unit[0] + ("" if value == 1 else "s")
    cosas = unit[1] if value == 1 else " ".join(_plural(word) for word in unit[1].split())
    start = rng.choice(
        [("you have ", "usted tiene "), ("you have ", "tiene "), ("there are ", "hay "),
         ("please wait ", "por favor espere "),
         ("", ""), ("in ", "en "), ("the call lasted ", "la llamada duró ")]
    )  # fmt: skip
    return f"{start[0]}{english} {things}.", f"{start[1]}{spanish} {cosas}."


def _plural(spanish: str) -> str:
    return "dólares" if spanish == "dólar" else spanish + "s"


def _sentence(rng: random.Random) -> Both:
    english, spanish = rng.choice(_rows(_SENTENCES))
    return english, spanish


def _two(rng: random.Random) -> Both:
    one, other = rng.choice((_sentence, _state, _how_many))(rng), rng.choice((_request, _choice, _sentence))(rng)
    return f"{_capital(one[0])} {_capital(other[0])}", f"{_capital(one[1])} {_capital(other[1])}"


def _capital(text: str) -> str:
    return text[:1] + text[1:2].upper() + text[2:] if text.startswith("¿") else text[:1].upper() + text[1:]


def _question(rng: random.Random) -> Both:
    action, thing = rng.choice(_rows(_ACTIONS)), _thing(rng)
    start = rng.choice(
        [("do you want to ", "¿desea "), ("do you want to ", "¿quiere "), ("would you like to ", "¿le gustaría "),
         ("are you sure you want to ", "¿está seguro de que desea ")]
    )  # fmt: skip
    return f"{start[0]}{action[0]} {thing[0]}?", f"{start[1]}{action[1]} {thing[1]}?"
