// What components are written in: htm's templates over Preact.
import { h, render, Component } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { render, useEffect, useLayoutEffect, useRef, useState };

// A component that is rendered again only where one of its properties is another: messages never change, they are replaced.
export function memo(inner) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const names = Object.keys(next);
      return names.length !== Object.keys(this.props).length || names.some((name) => next[name] !== this.props[name]);
    }
    render(props) {
      return h(inner, props);
    }
  };
}
