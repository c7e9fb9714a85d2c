"""Reads the dynamic section of a 64-bit little-endian ELF file, and takes its run path away."""
import struct

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB, DT_RPATH, DT_RUNPATH = 0, 1, 5, 15, 29
ENTRY = struct.Struct("<qQ")


class DynamicSection:

    def __init__(self, data):
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        self.data = bytearray(data)
        (table,) = struct.unpack_from("<Q", data, 32)
        entry_size, count = struct.unpack_from("<HH", data, 54)
        segments = [struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(count)]
        self.loads = [(address, offset, size) for kind, _, offset, address, _, size in segments if kind == PT_LOAD]
        (self.begin, self.num_bytes), = [(offset, size) for kind, _, offset, _, _, size in segments if kind == PT_DYNAMIC]

    def entries(self):
        found = list(ENTRY.iter_unpack(self.data[self.begin:self.begin + self.num_bytes]))
        return found[:[tag for tag, _ in found].index(DT_NULL)]

    def text(self, place):
        strings = next(value for tag, value in self.entries() if tag == DT_STRTAB)
        begin = next(strings - address + offset for address, offset, size in self.loads if address <= strings < address + size)
        return self.data[begin + place:self.data.index(0, begin + place)].decode()

    def needed(self):
        """Returns the names of the libraries that it needs."""
        return [self.text(value) for tag, value in self.entries() if tag == DT_NEEDED]

    def run_path(self):
        """Returns the folders in which the loader looks for those; empty if there are none."""
        return ":".join(self.text(value) for tag, value in self.entries() if tag in (DT_RPATH, DT_RUNPATH))

    def remove_run_path(self):
        kept = [entry for entry in self.entries() if entry[0] not in (DT_RPATH, DT_RUNPATH)]
        section = b"".join(ENTRY.pack(*entry) for entry in kept)
        self.data[self.begin:self.begin + self.num_bytes] = section.ljust(self.num_bytes, b"\0")
