"""The part of PTX that `cuda_ipc`'s kernel is written in, run thread by thread on this host."""

import re
import struct

MASKS = {"32": 0xFFFF_FFFF, "64": 0xFFFF_FFFF_FFFF_FFFF}
_INSTRUCTION = re.compile(r"(?:@%(\w+) )?([\w.]+)(?: (.*))?;")
_ADDRESS = re.compile(r"\[%?(\w+)(?:\+(\d+))?\]")


class Memory:
    """Bytes at an address; a 16-byte access elsewhere, or not aligned, is an error."""

    def __init__(self, address, content):
        self.address, self.content = address, bytearray(content)

    def locate(self, address):
        assert address % 16 == 0, f"{address:#x} is not aligned"
        at = address - self.address
        assert 0 <= at <= len(self.content) - 16, f"{address:#x} is outside"
        return at


def run_kernel(ptx, parameters, memory, num_blocks, num_threads):
    """Run the one entry; `parameters` are bytes by name."""
    program, labels = parse(ptx.partition("{")[2])
    places, body = {}, b""
    for name, value in parameters.items():
        places[name] = len(body)
        body += value
    for block in range(num_blocks):
        for thread in range(num_threads):
            registers = {
                "tid.x": thread, "ctaid.x": block, "ntid.x": num_threads, "nctaid.x": num_blocks
            }  # fmt: skip
            run_thread(program, labels, registers | places, body, memory)


def parse(body):
    """(guard, operation, operands) of each instruction, and where labels are."""
    program, labels = [], {}
    for line in map(str.strip, body.splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(program)
        elif line and line[0] not in ".{}":
            guard, operation, operands = _INSTRUCTION.fullmatch(line).groups()
            program.append((guard, operation, operands or ""))
    return program, labels


def run_thread(program, labels, registers, body, memory):
    at = 0
    for _ in range(100_000):
        guard, operation, operands = program[at]
        at += 1
        if guard and not registers[guard]:
            continue
        if operation == "ret":
            return
        if operation == "bra":
            at = labels[operands]
        elif ".global" in operation:
            move_words(operation, operands, registers, memory)
        else:
            compute(operation, operands, registers, body)
    raise AssertionError("a thread does not end")


def move_words(operation, operands, registers, memory):
    """`ld.global.v4.u32 {%a, …}, [%p+4]`, or the other way round."""
    name, offset = _ADDRESS.search(operands).groups()
    place = memory.locate(registers[name] + int(offset or 0))
    words = re.search(r"\{(.*)\}", operands)[1].replace("%", "").split(", ")
    match operation:
        case "ld.global.v4.u32":
            registers |= zip(words, struct.unpack_from("<4I", memory.content, place), strict=True)
        case "st.global.v4.u32":
            struct.pack_into("<4I", memory.content, place, *(registers[each] for each in words))


def compute(operation, operands, registers, body):
    """An instruction on registers and parameters."""
    target, *given = operands.replace("%", "").split(", ")
    kind, mask = operation.split(".")[0], MASKS[operation[-2:]]
    if operation.startswith("ld.param"):
        name, offset = _ADDRESS.fullmatch(given[0]).groups()
        form = "<I" if mask == MASKS["32"] else "<Q"
        found = struct.unpack_from(form, body, registers[name] + int(offset or 0))[0]
    else:
        values = [int(each) if each.isdigit() else registers[each] for each in given]
        found = {
            "mov": lambda a: a,
            "and": lambda a, b: a & b,
            "shr": lambda a, b: a >> b,
            "shl": lambda a, b: a << b,
            "div": lambda a, b: a // b,
            "rem": lambda a, b: a % b,
            "add": lambda a, b: a + b,
            "mul": lambda a, b: a * b,
            "mad": lambda a, b, c: a * b + c,
            "setp": lambda a, b: a >= b if ".ge." in operation else a > b,
        }[kind](*values)
        mask = MASKS["64"] if ".wide." in operation else mask
    registers[target] = found & mask
