// Numbers as bits: floats of any width, and integers with a scale.

/** Bits of the exponent and of the mantissa. `hasNoInfinity`: only all ones is not a number, as in OCP's E4M3. */
export const FLOATS = {
  float32: { exponent: 8, mantissa: 23 },
  bfloat16: { exponent: 8, mantissa: 7 },
  float16: { exponent: 5, mantissa: 10 },
  "float8 E4M3": { exponent: 4, mantissa: 3, hasNoInfinity: true },
};

export const widthOf = ({ exponent, mantissa }) => 1 + exponent + mantissa;

/** The parts of a float: its sign (0 or 1), exponent and mantissa as ints. */
export function split(code, { exponent, mantissa }) {
  return {
    sign: Math.floor(code / 2 ** (exponent + mantissa)) % 2,
    power: Math.floor(code / 2 ** mantissa) % 2 ** exponent,
    fraction: code % 2 ** mantissa,
  };
}

export function floatOf(code, format) {
  const { exponent, mantissa, hasNoInfinity } = format;
  const { sign, power, fraction } = split(code, format);
  const [bias, top] = [2 ** (exponent - 1) - 1, 2 ** exponent - 1];
  const signed = sign ? -1 : 1;
  if (power === top && (hasNoInfinity ? fraction === 2 ** mantissa - 1 : true)) {
    return fraction ? NaN : signed * Infinity;
  }
  if (!power) return signed * 2 ** (1 - bias - mantissa) * fraction;
  return signed * 2 ** (power - bias) * (1 + fraction / 2 ** mantissa);
}

/** Return the code of the nearest float, the even one of two. With 32 bits, it is the code of the number itself. */
export function codeOf(number, format) {
  if (format.mantissa === 23) return new Uint32Array(new Float32Array([number]).buffer)[0];
  const half = 2 ** (format.exponent + format.mantissa);
  const size = Math.abs(number);
  let [low, high] = [0, half - 1];
  while (!(floatOf(high, format) < Infinity)) high -= 1;
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (floatOf(middle, format) < size) low = middle + 1;
    else high = middle;
  }
  const [above, below] = [floatOf(low, format) - size, low ? size - floatOf(low - 1, format) : Infinity];
  const nearest = below < above || (below === above && low % 2) ? low - 1 : low;
  return number < 0 || Object.is(number, -0) ? half + nearest : nearest;
}

/** A float in words: its sign, power of two and mantissa. */
export function formula(code, format) {
  const { sign, power, fraction } = split(code, format);
  const bias = 2 ** (format.exponent - 1) - 1;
  if (!Number.isFinite(floatOf(code, format))) return "not a finite number";
  const mantissa = (power ? 1 : 0) + fraction / 2 ** format.mantissa;
  return `${sign ? "−" : "+"}2^${power ? power - bias : 1 - bias} × ${mantissa}`;
}
