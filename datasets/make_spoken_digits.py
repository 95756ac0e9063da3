"""Make `spoken_digits.npz` anew: the ten digits, spoken by eSpeak NG, as log-mel frames.

    pip install espeakng-loader==0.2.4          # brings eSpeak NG 1.52 along; no dependency of the project
    python -m datasets.make_spoken_digits       # writes datasets/spoken_digits.npz

Twenty-four speakers say every digit twice, faster and slower, higher and lower. A speaker is an accent of English, a
voice (its formants) and a pitch; no two of them share a voice. Noise of the strength of a quiet room is
added: without it the pauses are exactly 0. Noise and the choice of speed and pitch are drawn with a fixed seed.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.signal import resample_poly

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en", "en-us", "en-gb-scotland", "en-029", "en-gb-x-rp", "en-us-nyc")
VOICES = (
    "m1", "f1", "m2", "f2", "m3", "f3", "m4", "f4", "m5", "f5", "m6", "m7", "klatt", "klatt2", "klatt3", "klatt4",
    "Andy", "Annie", "Alex", "Alicia", "Michael", "linda", "max", "steph",
)  # fmt: skip
TAKES = 2  # of every digit by every speaker

RATE = 8000  # samples a second
WINDOW, HOP, BINS = 200, 80, 40  # 25 ms, 10 ms
STEP = 0.5  # of the logarithm: about 2 dB, and a file of half the size

# From espeak-ng/speak_lib.h.
_RETRIEVAL, _UTF8 = 1, 1
_SPEED, _PITCH, _RANGE = 1, 3, 4
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Synthesiser:
    """eSpeak NG in this process, through its C interface: text in, samples out."""

    def __init__(self) -> None:
        import espeakng_loader

        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        self.rate = self.library.espeak_Initialize(_RETRIEVAL, 0, espeakng_loader.get_data_path().encode(), 0)
        if self.rate <= 0:
            raise RuntimeError("eSpeak NG could not be started.")
        self.library.espeak_ng_SetRandSeed(
            ctypes.c_long(0)
        )  # else the time of day: breath and flutter are random
        self.pieces: list[np.ndarray] = []
        self.callback = _CALLBACK(self._receive)  # C holds no reference to it
        self.library.espeak_SetSynthCallback(self.callback)

    def _receive(self, samples, count: int, events) -> int:
        if samples and count:
            self.pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
        """The text as samples in [-1, 1], `RATE` a second; speed in words a minute, pitch from 0 to 99."""
        if self.library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise RuntimeError(f"eSpeak NG has no voice {voice}.")
        for parameter, value in ((_SPEED, speed), (_PITCH, pitch), (_RANGE, 50)):
            self.library.espeak_SetParameter(parameter, value, 0)
        self.pieces.clear()
        raw = text.encode()
        self.library.espeak_Synth(raw, ctypes.c_size_t(len(raw) + 1), 0, 0, 0, _UTF8, None, None)
        self.library.espeak_Synchronize()
        return resample_poly(np.concatenate(self.pieces) / 2**15, RATE, self.rate)


def trimmed(samples: np.ndarray) -> np.ndarray:
    """The samples without the silence before and after."""
    loud = np.flatnonzero(np.abs(samples) > 0.01 * np.abs(samples).max())
    return samples[loud[0] : loud[-1] + 1]


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Frames `[n, BINS]`: the logarithm of the power in bands of equal width on the mel scale, up to 4 kHz."""
    size = 512
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW), size)) ** 2
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    corners = 700 * (10 ** (np.linspace(0, top, BINS + 2) / 2595) - 1)
    frequency = np.fft.rfftfreq(size, 1 / RATE)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    bands = np.clip(
        np.minimum((frequency - low) / (middle - low), (high - frequency) / (high - middle)), 0, None
    )
    return np.log(power @ bands.T + 1e-6)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m datasets.make_spoken_digits", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("spoken_digits.npz"))
    args = parser.parse_args(argv)

    synthesiser, rng = Synthesiser(), np.random.default_rng(0)
    frames, labels, speakers, takes = [], [], [], []
    names = [f"{ACCENTS[i % len(ACCENTS)]}+{voice}" for i, voice in enumerate(VOICES)]
    for speaker, name in enumerate(names):
        own_pitch = rng.integers(25, 75)
        for digit, word in enumerate(WORDS):
            for take in range(TAKES):
                speed, pitch = rng.integers(150, 260), own_pitch + rng.integers(-12, 13)
                samples = trimmed(synthesiser.say(word, name, int(speed), int(pitch)))
                samples = samples / np.sqrt(np.mean(samples**2))
                noise = rng.normal(size=len(samples)) * 10 ** rng.uniform(-2.5, -1.0)
                mel = log_mel(samples + noise)
                frames.append((np.round(mel / STEP) * STEP).astype(np.float16))
                labels.append(digit)
                speakers.append(speaker)
                takes.append(take)
    np.savez_compressed(
        args.out,
        frames=np.concatenate(frames),
        offsets=np.cumsum([0, *map(len, frames)]),
        label=np.array(labels, np.int8),
        speaker=np.array(speakers, np.int8),
        index=np.array(takes, np.int8),
        speakers=np.array(names),
    )
    print(
        f"{args.out}: {len(frames)} recordings, {sum(map(len, frames))} frames, {args.out.stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()
